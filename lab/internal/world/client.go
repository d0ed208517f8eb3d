package world

import (
	"context"
	"errors"
	"io"
	"net"

	"k8s.io/client-go/rest"
)

// A Client speaks to a lab's supervisor.
type Client struct {
	socket string
	// OnClose ends what belongs to this client: an ephemeral lab.
	onClose func() error
}

// NewClient returns a client of the control socket at that path. It does not
// connect.
func NewClient(socket string) *Client { return &Client{socket: socket} }

// OnClose makes Close call fn.
func (c *Client) OnClose(fn func() error) { c.onClose = fn }

// Socket is the path of the control socket.
func (c *Client) Socket() string { return c.socket }

// Close ends an ephemeral lab; another one goes on.
func (c *Client) Close() error {
	if c.onClose != nil {
		return c.onClose()
	}
	return nil
}

// Status says what there is.
func (c *Client) Status(ctx context.Context) (Status, error) {
	return Status{}, errors.ErrUnsupported
}

// Watch calls fn with each line of progress, from the first on, and returns
// when the lab is ready, or with the error that it failed with.
func (c *Client) Watch(ctx context.Context, fn func(Progress)) error { return errors.ErrUnsupported }

// Exec runs a command to its end. A command that ran has no error, whatever
// its exit code.
func (c *Client) Exec(ctx context.Context, req ExecRequest) (ExecResult, error) {
	return ExecResult{}, errors.ErrUnsupported
}

// A Resize is a new size of a terminal.
type Resize struct{ Rows, Cols uint16 }

// ExecStream runs a command with its input and output connected, on a terminal
// when req.TTY is set (then there is no stderr), and returns its exit code.
func (c *Client) ExecStream(ctx context.Context, req ExecRequest, stdin io.Reader, stdout, stderr io.Writer, resize <-chan Resize) (int, error) {
	return 0, errors.ErrUnsupported
}

// Dial connects to an address as a cluster's control plane would.
func (c *Client) Dial(ctx context.Context, cluster, network, address string) (net.Conn, error) {
	return nil, errors.ErrUnsupported
}

// RESTConfig is the administrator's access to a cluster's API server, through
// the supervisor.
func (c *Client) RESTConfig(ctx context.Context, cluster string) (*rest.Config, error) {
	return nil, errors.ErrUnsupported
}

// Kubeconfig is the administrator's kubeconfig as it is valid inside the lab:
// for a command run in the target "<cluster>/control-plane", where KUBECONFIG
// already names such a file.
func (c *Client) Kubeconfig(ctx context.Context, cluster string) ([]byte, error) {
	return nil, errors.ErrUnsupported
}

// StopComponent ends a component of a control plane, "kube-apiserver" or
// another, until StartComponent.
func (c *Client) StopComponent(ctx context.Context, cluster, component string) error {
	return errors.ErrUnsupported
}

// StartComponent starts a component again and waits until it is healthy.
func (c *Client) StartComponent(ctx context.Context, cluster, component string) error {
	return errors.ErrUnsupported
}

// Sightings are the packets with a token, in the order of time.
func (c *Client) Sightings(ctx context.Context, q SightingQuery) ([]Sighting, error) {
	return nil, errors.ErrUnsupported
}

// WirePackets says what passed on a host's interfaces.
func (c *Client) WirePackets(ctx context.Context, q WireQuery) (WireReport, error) {
	return WireReport{}, errors.ErrUnsupported
}

// WritePcap writes all packets that are still in the rings, merged, as pcapng
// with one interface per host and interface name.
func (c *Client) WritePcap(ctx context.Context, w io.Writer) error { return errors.ErrUnsupported }

// State is what ip, nft, wg and conntrack say on every host, gateways and pods
// included.
func (c *Client) State(ctx context.Context) ([]HostState, error) { return nil, errors.ErrUnsupported }

// Logs are the logs of the control planes, the agent, the console and of every
// container, ended ones included.
func (c *Client) Logs(ctx context.Context) ([]Log, error) { return nil, errors.ErrUnsupported }

// KillContainer kills a container's process with SIGKILL. The kubelet starts
// it again. The empty container name means the pod's only one.
func (c *Client) KillContainer(ctx context.Context, target, container string) error {
	return errors.ErrUnsupported
}

// Down ends the lab and returns when it is gone.
func (c *Client) Down(ctx context.Context) error { return errors.ErrUnsupported }
