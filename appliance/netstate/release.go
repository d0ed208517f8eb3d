package netstate

import "fmt"

// LeastKernel is the oldest Linux that takes all that a State may have.
const LeastKernel = "5.10"

// KernelTooOld reports whether a release as uname(2) and the status of a node
// give it, such as 6.1.0-18-cloud-amd64, is older than LeastKernel. The error
// says that it is none.
func KernelTooOld(release string) (bool, error) {
	var major, minor, leastMajor, leastMinor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil {
		return false, fmt.Errorf("kernel release %q: not understood", release)
	}
	if _, err := fmt.Sscanf(LeastKernel, "%d.%d", &leastMajor, &leastMinor); err != nil {
		return false, err
	}
	return major < leastMajor || major == leastMajor && minor < leastMinor, nil
}
