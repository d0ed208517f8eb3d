package clusters

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// mostLog is the most that is read of one log, in bytes: those of the lab's own rows are
// far smaller.
const mostLog = 64 << 20

// Logs are the logs of all containers of pods that are there, those that ended
// last included, from the marks on; see (*world.Client).Logs.
func (s *Set) Logs(ctx context.Context, since map[string]world.LogMark) ([]world.Log, error) {
	var out []world.Log
	for _, c := range s.Names() {
		all, err := s.Pods(ctx, c)
		if err != nil {
			return nil, fmt.Errorf("cluster %s: %w", c, err)
		}
		for _, p := range all {
			logs, err := s.logsOf(ctx, c, p, since)
			if err != nil {
				return nil, err
			}
			out = append(out, logs...)
		}
	}
	return out, nil
}

// PodLogs are the logs of one pod, given as cluster/namespace/name, from the
// marks on.
func (s *Set) PodLogs(ctx context.Context, target string, since map[string]world.LogMark) ([]world.Log, error) {
	cluster, _, _ := strings.Cut(target, "/")
	p, err := s.Find(ctx, target)
	if err != nil {
		return nil, err
	}
	return s.logsOf(ctx, cluster, p, since)
}

// logsOf names each run of a container as the lab's own kubelets do; see
// expect.ContainerOf. What has not begun to write has no log.
func (s *Set) logsOf(ctx context.Context, cluster string, p corev1.Pod, since map[string]world.LogMark) ([]world.Log, error) {
	client, err := s.Client(cluster)
	if err != nil {
		return nil, err
	}
	var out []world.Log
	for _, c := range p.Status.ContainerStatuses {
		type run struct {
			number   int32
			previous bool
		}
		var runs []run
		if c.LastTerminationState.Terminated != nil {
			runs = append(runs, run{c.RestartCount - 1, true})
		}
		if c.State.Waiting == nil {
			runs = append(runs, run{c.RestartCount, false})
		}
		for _, r := range runs {
			text, err := client.CoreV1().Pods(p.Namespace).GetLogs(p.Name, &corev1.PodLogOptions{Container: c.Name, Previous: r.previous, LimitBytes: new(int64(mostLog))}).DoRaw(ctx)
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			if err != nil { // it ended, or was made again, in between
				continue
			}
			name := fmt.Sprintf("%s/%s/log/%s_%s_%s/%s/%d", cluster, p.Spec.NodeName, p.Namespace, p.Name, p.UID, c.Name, r.number)
			log := world.Log{Name: name, Text: string(text)}
			if mark, ok := since[name]; ok {
				log = log.Since(mark)
			}
			out = append(out, log)
		}
	}
	return out, nil
}
