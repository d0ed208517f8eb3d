package topology

import "errors"

// Load reads and checks a topology file. All that is wrong with it is in the
// error, each with its place in the file.
func Load(path string) (*Topology, error) { return nil, errors.ErrUnsupported }
