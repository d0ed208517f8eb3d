package pods

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// followInner keeps the registry informed of the network namespace that the pod
// works in, until the pod is gone: the one that is mounted at path. At first that
// may be the namespace of a pod before this one, which has not ended yet; this
// pod then mounts its own there.
func (p *pod) followInner(path string) {
	var known *os.File
	for pause(p.life, 20*time.Millisecond) {
		now, err := openIfOther(path, known)
		if err != nil || now == nil {
			continue // nothing is mounted there, or what is known
		}
		p.node.cfg.Registry.setInner(p.registered(), now)
		if known != nil {
			p.node.log.Info("the pod works in another network namespace", "pod", p.current().Namespace+"/"+p.current().Name, "path", path)
			known.Close() // while it is open, the links in it stay
		}
		known = now
	}
	<-p.gone
	if known != nil {
		known.Close()
	}
}

// openIfOther opens the network namespace that is mounted at path. It returns nil
// if that is the known one.
func openIfOther(path string, known *os.File) (*os.File, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil {
		return nil, err
	}
	if fs.Type != unix.NSFS_MAGIC {
		return nil, fmt.Errorf("%s is no network namespace", path)
	}
	now, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if known != nil {
		was, err := known.Stat()
		if err != nil {
			return nil, err
		}
		if os.SameFile(was, now) {
			return nil, nil
		}
	}
	return os.Open(path)
}
