package netstate

// Changes turns one State into another. Each list is in the order in which
// it is carried out; what is added or changed comes before what is removed.
type Changes struct {
	AddLinks []Link
	// ChangeLinks are changed in place, RecreateLinks deleted and made anew
	// because the kernel can't change what differs; what hung on them is
	// among the things to add.
	ChangeLinks   []Link
	RecreateLinks []Link
	DeleteLinks   []Link

	SetWireGuard []WireGuard

	AddAddresses, DeleteAddresses          []Address
	AddRoutes, ReplaceRoutes, DeleteRoutes []Route
	AddRules, DeleteRules                  []Rule
	SetTables                              []Table
	DeleteTables                           []TableID
}

// A TableID identifies an nftables table.
type TableID struct {
	Family Family
	Name   string
}

// Empty reports whether there is nothing to do.
func (c Changes) Empty() bool { return c.Len() == 0 }

// Len returns the number of single changes.
func (c Changes) Len() int {
	return len(c.AddLinks) + len(c.ChangeLinks) + len(c.RecreateLinks) + len(c.DeleteLinks) +
		len(c.SetWireGuard) +
		len(c.AddAddresses) + len(c.DeleteAddresses) +
		len(c.AddRoutes) + len(c.ReplaceRoutes) + len(c.DeleteRoutes) +
		len(c.AddRules) + len(c.DeleteRules) +
		len(c.SetTables) + len(c.DeleteTables)
}

// Diff returns the changes that lead from observed to desired, in a fixed
// order.
func Diff(observed, desired State) Changes { return Changes{} }
