package pods

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
)

// reference is a Secret or ConfigMap whose content is in a volume.
type reference struct{ kind, name string }

// references returns what the volumes of a pod refer to.
func references(pod *corev1.Pod) map[reference]bool {
	refs := map[reference]bool{}
	for _, v := range pod.Spec.Volumes {
		switch {
		case v.Secret != nil:
			refs[reference{"secret", v.Secret.SecretName}] = true
		case v.ConfigMap != nil:
			refs[reference{"configmap", v.ConfigMap.Name}] = true
		case v.Projected != nil:
			for _, s := range v.Projected.Sources {
				if s.Secret != nil {
					refs[reference{"secret", s.Secret.Name}] = true
				}
				if s.ConfigMap != nil {
					refs[reference{"configmap", s.ConfigMap.Name}] = true
				}
			}
		}
	}
	return refs
}

// keepVolumes keeps the content of the volumes current: when an object or the
// pod changes, and before a token expires.
func (p *pod) keepVolumes(ctx context.Context) {
	api := p.current()
	for ref := range references(api) {
		go p.watchObject(ctx, api.Namespace, ref)
	}
	retry := time.Duration(0)
	for {
		woken := p.node.cfg.Registry.wake()
		wait := time.Hour
		if next := p.volumes.nextRefresh(); !next.IsZero() {
			wait = max(time.Until(next), time.Second)
		}
		if retry > 0 {
			wait = retry
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-woken: // the time has jumped
			t.Stop()
			continue
		case <-p.refresh:
		case <-t.C:
		}
		t.Stop()
		retry = 0
		if err := p.volumes.sync(ctx); err != nil && ctx.Err() == nil {
			p.node.log.Warn("refresh volumes", "pod", api.Namespace+"/"+api.Name, "err", err)
			retry = 2 * time.Second
		}
	}
}

// watchObject asks for a refresh whenever an object changes. It watches this
// one only: the Node authorizer permits no more.
func (p *pod) watchObject(ctx context.Context, namespace string, ref reference) {
	options := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", ref.name).String()}
	core := p.node.client.CoreV1()
	for {
		var w watch.Interface
		var err error
		if ref.kind == "secret" {
			w, err = core.Secrets(namespace).Watch(ctx, options)
		} else {
			w, err = core.ConfigMaps(namespace).Watch(ctx, options)
		}
		if err == nil {
			p.follow(ctx, w)
		}
		if !pause(ctx, statusRetry) {
			return
		}
	}
}

func (p *pod) follow(ctx context.Context, w watch.Interface) {
	defer w.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case _, ok := <-w.ResultChan():
			if !ok {
				return
			}
			select {
			case p.refresh <- struct{}{}:
			default:
			}
		}
	}
}
