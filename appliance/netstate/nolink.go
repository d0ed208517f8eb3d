package netstate

// A NoLinkError says that a link is not there. Where the link is somebody else's, such as
// that of a pod, it may have gone since the host was looked at.
type NoLinkError struct{ Name string }

// Error names the link.
func (e *NoLinkError) Error() string { return "there is no link " + e.Name }
