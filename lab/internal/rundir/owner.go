package rundir

import (
	"crypto/rand"
	"os"
	"os/user"
	"path"
	"strconv"
	"strings"
	"syscall"

	"github.com/isthmus-net/isthmus/lab/internal/cgroup"
)

// Caller is the user who runs the lab: the one who has called sudo, where root
// is not that user.
func Caller() int {
	uid := os.Getuid()
	if by, err := strconv.Atoi(os.Getenv("SUDO_UID")); err == nil && uid == 0 {
		return by
	}
	return uid
}

// Own makes a run directory the caller's. This is all that says whose it is.
func Own(dir string) error {
	if uid, err := Owner(dir); err != nil || uid == Caller() {
		return err
	}
	return os.Chown(dir, Caller(), -1)
}

// Owner is the user to whom a run directory belongs.
func Owner(dir string) (uid int, err error) {
	info, err := os.Stat(dir)
	if err != nil {
		return 0, err
	}
	return int(info.Sys().(*syscall.Stat_t).Uid), nil
}

// Mine tells whether a run directory is the caller's.
func Mine(dir string) bool {
	uid, err := Owner(dir)
	return err == nil && uid == Caller()
}

// UserName is a user's name, with the number.
func UserName(uid int) string {
	number := strconv.Itoa(uid)
	u, err := user.LookupId(number)
	if err != nil {
		return "user " + number
	}
	return u.Username + " (user " + number + ")"
}

// newCgroup is a name for the cgroup of a lab: that of no other, not even of one
// of the same name in another directory, or before.
func newCgroup(name string) string {
	return path.Join(cgroup.Top, name+"-"+strings.ToLower(rand.Text()[:8]))
}
