package world

import "context"

// A Probe is one thing that a lab needs and whether it is there.
type Probe struct {
	Name   string   `json:"name"`
	OK     bool     `json:"ok"`
	Detail string   `json:"detail"`        // what was found
	Fix    string   `json:"fix,omitempty"` // what to do when it is not OK
	Needed []string `json:"needed"`        // the worlds that cannot be without it: "native", "vm"
}

// Doctor probes this machine for what the worlds need.
func Doctor(ctx context.Context, binDir string) []Probe { return nil }
