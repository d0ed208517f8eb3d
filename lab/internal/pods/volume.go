package pods

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// volumes are the volumes of one pod, below dir. Those whose content comes from
// the API are written as the real kubelet does: a directory of links into
// another one, which is replaced at once when the content changes.
type volumes struct {
	client kubernetes.Interface
	pod    func() *corev1.Pod // the current one, with addresses
	dir    string             // a directory per volume
	host   string             // the root that hostPath sees

	mu     sync.Mutex
	tokens map[string]*token // by volume and path
	wrote  map[string]string // digest of the content, by volume
}

type token struct {
	value   string
	refresh time.Time
}

func newVolumes(client kubernetes.Interface, dir, host string, pod func() *corev1.Pod) *volumes {
	return &volumes{client: client, pod: pod, dir: dir, host: host, tokens: map[string]*token{}, wrote: map[string]string{}}
}

// path returns where a volume of the pod is.
func (v *volumes) path(vol *corev1.Volume) (string, error) {
	if vol.HostPath == nil {
		return filepath.Join(v.dir, vol.Name), nil
	}
	return v.hostPath(vol.HostPath)
}

// sync creates all volumes and brings their content up to date.
func (v *volumes) sync(ctx context.Context) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	pod := v.pod()
	var errs []error
	for i := range pod.Spec.Volumes {
		vol := &pod.Spec.Volumes[i]
		if err := v.syncOne(ctx, pod, vol); err != nil {
			errs = append(errs, fmt.Errorf("volume %s: %w", vol.Name, err))
		}
	}
	return errors.Join(errs...)
}

func (v *volumes) syncOne(ctx context.Context, pod *corev1.Pod, vol *corev1.Volume) error {
	var files map[string]file
	var err error
	objects := reader{ctx, v.client, pod.Namespace}
	switch {
	case vol.EmptyDir != nil:
		return v.emptyDir(pod, vol)
	case vol.HostPath != nil:
		_, err := v.hostPath(vol.HostPath)
		return err
	case vol.Secret != nil:
		s := vol.Secret
		var sec *corev1.Secret
		if sec, err = objects.secret(s.SecretName); err == nil {
			files, err = selectKeys(sec.Data, s.Items, s.DefaultMode, s.Optional, "Secret "+pod.Namespace+"/"+s.SecretName)
		} else if err = optionally(s.Optional, err); err == nil {
			files = map[string]file{}
		}
	case vol.ConfigMap != nil:
		c := vol.ConfigMap
		var cm *corev1.ConfigMap
		if cm, err = objects.configMap(c.Name); err == nil {
			files, err = selectKeys(configMapData(cm), c.Items, c.DefaultMode, c.Optional, "ConfigMap "+pod.Namespace+"/"+c.Name)
		} else if err = optionally(c.Optional, err); err == nil {
			files = map[string]file{}
		}
	case vol.DownwardAPI != nil:
		files, err = downward(pod, vol.DownwardAPI.Items, vol.DownwardAPI.DefaultMode)
	case vol.Projected != nil:
		files, err = v.projected(ctx, pod, vol, objects)
	default:
		return errors.New("its kind is not supported by the lab's kubelet; it knows emptyDir, hostPath, secret, configMap, downwardAPI and projected")
	}
	if err != nil {
		return err
	}
	digest := digestOf(files)
	if v.wrote[vol.Name] == digest {
		return nil
	}
	if err := writeAtomically(filepath.Join(v.dir, vol.Name), files, fsGroup(pod)); err != nil {
		return err
	}
	v.wrote[vol.Name] = digest
	return nil
}

func (v *volumes) emptyDir(pod *corev1.Pod, vol *corev1.Volume) error {
	path := filepath.Join(v.dir, vol.Name)
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	if err := os.MkdirAll(path, 0o777); err != nil {
		return err
	}
	mode := os.FileMode(0o777)
	if g := fsGroup(pod); g >= 0 {
		if err := os.Chown(path, 0, g); err != nil {
			return err
		}
		mode |= os.ModeSetgid
	}
	return os.Chmod(path, mode)
}

// realPaths are below which hostPath means this machine. Everything else is
// the node's own, so that nodes do not share files and the lab leaves none.
var realPaths = []string{"/dev", "/proc", "/sys", "/lib/modules"}

// hostPath returns where a hostPath volume is, creating or checking it as its
// type demands.
func (v *volumes) hostPath(hp *corev1.HostPathVolumeSource) (string, error) {
	clean := filepath.Clean("/" + hp.Path)
	path := filepath.Join(v.host, clean)
	own := true
	for _, p := range realPaths {
		if clean == p || strings.HasPrefix(clean, p+"/") {
			path, own = clean, false
		}
	}
	kind := corev1.HostPathUnset
	if hp.Type != nil {
		kind = *hp.Type
	}
	if own {
		switch kind {
		case corev1.HostPathDirectoryOrCreate, corev1.HostPathUnset:
			if _, err := os.Stat(path); err != nil {
				if err := os.MkdirAll(path, 0o755); err != nil {
					return "", err
				}
			}
		case corev1.HostPathFileOrCreate:
			f, err := os.OpenFile(path, os.O_CREATE, 0o644)
			if err != nil {
				return "", fmt.Errorf("hostPath %s: %w", clean, err)
			}
			f.Close()
		}
	}
	st, err := os.Stat(path)
	if err != nil {
		return "", fmt.Errorf("hostPath type check failed: %s is not there", clean)
	}
	want := map[corev1.HostPathType]bool{
		corev1.HostPathDirectory:         st.IsDir(),
		corev1.HostPathDirectoryOrCreate: st.IsDir(),
		corev1.HostPathFile:              st.Mode().IsRegular(),
		corev1.HostPathFileOrCreate:      st.Mode().IsRegular(),
		corev1.HostPathSocket:            st.Mode()&os.ModeSocket != 0,
		corev1.HostPathCharDev:           st.Mode()&os.ModeCharDevice != 0,
		corev1.HostPathBlockDev:          st.Mode()&os.ModeDevice != 0 && st.Mode()&os.ModeCharDevice == 0,
		corev1.HostPathUnset:             true,
	}
	if !want[kind] {
		return "", fmt.Errorf("hostPath type check failed: %s is not a %s", clean, kind)
	}
	return path, nil
}

func (v *volumes) projected(ctx context.Context, pod *corev1.Pod, vol *corev1.Volume, objects reader) (map[string]file, error) {
	out := map[string]file{}
	mode := vol.Projected.DefaultMode
	for _, s := range vol.Projected.Sources {
		var files map[string]file
		var err error
		switch {
		case s.Secret != nil:
			var sec *corev1.Secret
			if sec, err = objects.secret(s.Secret.Name); err == nil {
				files, err = selectKeys(sec.Data, s.Secret.Items, mode, s.Secret.Optional, "Secret "+pod.Namespace+"/"+s.Secret.Name)
			} else {
				err = optionally(s.Secret.Optional, err)
			}
		case s.ConfigMap != nil:
			var cm *corev1.ConfigMap
			if cm, err = objects.configMap(s.ConfigMap.Name); err == nil {
				files, err = selectKeys(configMapData(cm), s.ConfigMap.Items, mode, s.ConfigMap.Optional, "ConfigMap "+pod.Namespace+"/"+s.ConfigMap.Name)
			} else {
				err = optionally(s.ConfigMap.Optional, err)
			}
		case s.DownwardAPI != nil:
			files, err = downward(pod, s.DownwardAPI.Items, mode)
		case s.ServiceAccountToken != nil:
			var t string
			if t, err = v.token(ctx, pod, vol.Name, s.ServiceAccountToken); err == nil {
				files = map[string]file{s.ServiceAccountToken.Path: {[]byte(t), fileMode(nil, mode)}}
			}
		default:
			err = errors.New("a projected source of this kind is not supported by the lab's kubelet")
		}
		if err != nil {
			return nil, err
		}
		for k, f := range files {
			out[k] = f
		}
	}
	return out, nil
}

// token returns a token bound to the pod, a new one when four fifths of the
// old one's life are over.
func (v *volumes) token(ctx context.Context, pod *corev1.Pod, volume string, p *corev1.ServiceAccountTokenProjection) (string, error) {
	key := volume + "/" + p.Path
	if t, ok := v.tokens[key]; ok && time.Now().Before(t.refresh) {
		return t.value, nil
	}
	req := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		ExpirationSeconds: p.ExpirationSeconds,
		BoundObjectRef:    &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID},
	}}
	if p.Audience != "" {
		req.Spec.Audiences = []string{p.Audience}
	}
	resp, err := v.client.CoreV1().ServiceAccounts(pod.Namespace).CreateToken(ctx, pod.Spec.ServiceAccountName, req, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("token of service account %s/%s: %w", pod.Namespace, pod.Spec.ServiceAccountName, err)
	}
	life := time.Until(resp.Status.ExpirationTimestamp.Time)
	// By the clock on the wall: a machine may sleep.
	v.tokens[key] = &token{resp.Status.Token, time.Now().Add(life * 4 / 5).Round(0)}
	return resp.Status.Token, nil
}

// nextRefresh returns when a token must be renewed.
func (v *volumes) nextRefresh() time.Time {
	v.mu.Lock()
	defer v.mu.Unlock()
	var next time.Time
	for _, t := range v.tokens {
		if next.IsZero() || t.refresh.Before(next) {
			next = t.refresh
		}
	}
	return next
}

// reader reads objects of one namespace from the API server.
type reader struct {
	ctx       context.Context
	client    kubernetes.Interface
	namespace string
}

// unknownRelation is how long the Node authorizer may need to learn that a pod
// bound to this node refers to an object.
const unknownRelation = 3 * time.Second

func (r reader) secret(name string) (s *corev1.Secret, err error) {
	err = r.patiently(func() error {
		s, err = r.client.CoreV1().Secrets(r.namespace).Get(r.ctx, name, metav1.GetOptions{})
		return err
	})
	return s, err
}

func (r reader) configMap(name string) (c *corev1.ConfigMap, err error) {
	err = r.patiently(func() error {
		c, err = r.client.CoreV1().ConfigMaps(r.namespace).Get(r.ctx, name, metav1.GetOptions{})
		return err
	})
	return c, err
}

func (r reader) patiently(get func() error) error {
	deadline := time.Now().Add(unknownRelation)
	for {
		err := get()
		if !apierrors.IsForbidden(err) || time.Now().After(deadline) || !pause(r.ctx, 50*time.Millisecond) {
			return err
		}
	}
}

func isNotFound(err error) bool { return apierrors.IsNotFound(err) }

// pause waits; it returns false when ctx ended first.
func pause(ctx context.Context, d time.Duration) bool { return pauseUnlessWoken(ctx, d, nil) }

// pauseUnlessWoken waits, at most until woken is closed.
func pauseUnlessWoken(ctx context.Context, d time.Duration, woken <-chan struct{}) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
	case <-woken:
	}
	return true
}

func fsGroup(pod *corev1.Pod) int {
	if pod.Spec.SecurityContext != nil && pod.Spec.SecurityContext.FSGroup != nil {
		return int(*pod.Spec.SecurityContext.FSGroup)
	}
	return -1
}
