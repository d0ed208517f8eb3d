package probe

import (
	"context"
	"encoding/json"
	"net"
	"net/netip"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/poll"

	"github.com/isthmus-net/isthmus/appliance/nettest"
)

func TestLatencyText(t *testing.T) {
	for _, tc := range []struct {
		in   time.Duration
		want string
	}{
		{0, "N/A"},
		{-time.Second, "N/A"},
		{1, "1µs"},
		{850 * time.Microsecond, "850µs"},
		{999999 * time.Nanosecond, "999µs"},
		{time.Millisecond, "1ms"},
		{12345 * time.Microsecond, "12ms"},
		{2 * time.Second, "2000ms"},
	} {
		assert.Equal(t, LatencyText(tc.in), tc.want)
	}
}

// TestTracker walks the state machine with the default timing.
func TestTracker(t *testing.T) {
	start := time.Unix(1000, 0)
	at := func(s float64) time.Time { return start.Add(time.Duration(s * float64(time.Second))) }
	type step struct {
		name    string
		do      func(*tracker)
		at      float64
		state   State
		latency time.Duration
		loss    float64
	}
	for _, tc := range []struct {
		name  string
		steps []step
	}{
		{"answered, then not", []step{
			{"start", func(tr *tracker) { tr.send(at(0), false) }, 0, Connecting, 0, 0},
			{"answer", func(tr *tracker) { tr.receive(at(0.003), at(0)) }, 0.003, Connected, 3 * time.Millisecond, 0},
			{"not yet lost", func(tr *tracker) { tr.send(at(2), false) }, 12, Connected, 3 * time.Millisecond, 0},
			{"lost", func(tr *tracker) {}, 12.5, Connected, 3 * time.Millisecond, 0.5},
			{"back", func(tr *tracker) { tr.send(at(13), false); tr.receive(at(13.001), at(13)) }, 13.001, Connected, time.Millisecond, 1.0 / 3},
		}},
		{"answers to nothing", []step{
			{"unknown stamp", func(tr *tracker) { tr.send(at(0), false); tr.receive(at(1), at(0.5)) }, 1, Connecting, 0, 0},
			{"once", func(tr *tracker) { tr.receive(at(1.5), at(0)) }, 1.5, Connected, 1500 * time.Millisecond, 0},
			{"twice", func(tr *tracker) { tr.receive(at(9), at(0)) }, 9, Connected, 1500 * time.Millisecond, 0},
		}},
		{"overtaken", []step{
			{"two on the way", func(tr *tracker) { tr.send(at(0), false); tr.send(at(2), false) }, 2, Connecting, 0, 0},
			{"the second first", func(tr *tracker) { tr.receive(at(2.001), at(2)) }, 2.001, Connected, time.Millisecond, 0},
			{"then the first", func(tr *tracker) { tr.receive(at(2.5), at(0)) }, 2.5, Connected, time.Millisecond, 0},
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tr := newTracker(2*time.Second, 5)
			for _, s := range tc.steps {
				s.do(tr)
				got := tr.status(at(s.at))
				assert.Equal(t, got.State, s.state, s.name)
				assert.Equal(t, got.Latency, s.latency, s.name)
				assert.Equal(t, got.Loss, s.loss, s.name)
			}
		})
	}
}

// TestSilence tells what a silence says of the tunnel: nothing before the probes were
// made, and nothing when this process did not run. Times are those of the defaults: a
// probe every 2 s, a look every 500 ms, an Error after five of the one and more than
// 10 s of the other.
func TestSilence(t *testing.T) {
	const (
		answered = "answered" // every probe, after a millisecond
		alone    = "alone"    // nobody answers
		stopped  = "stopped"  // this process does not run
		idle     = "idle"     // it looks, and does not come to send
	)
	type phase struct {
		what    string
		seconds float64 // how long it lasts
		state   State   // at its end
	}
	for _, tc := range []struct {
		name   string
		phases []phase
	}{
		{"the socket was open long before", []phase{{stopped, 59.5, Connecting}, {alone, 10.5, Connecting}, {alone, 0.5, Error}}},
		{"nobody was ever there", []phase{{alone, 10, Connecting}, {alone, 0.5, Error}, {alone, 3600, Error}}},
		{"the peer ends", []phase{{answered, 4, Connected}, {alone, 10, Connected}, {alone, 0.5, Error}}},
		{"it returns, and ends again", []phase{{alone, 20, Error}, {answered, 2, Connected}, {alone, 10, Connected}, {alone, 0.5, Error}}},
		{"it misses four probes", []phase{{answered, 4, Connected}, {alone, 9.5, Connected}, {answered, 2.5, Connected}, {alone, 10, Connected}}},
		{"this process stands still", []phase{{answered, 4, Connected}, {stopped, 60, Connected}, {alone, 0.5, Connected}, {answered, 2, Connected}}},
		{"it stands still before the first answer", []phase{{alone, 4, Connecting}, {stopped, 60, Connecting}, {alone, 0.5, Connecting}, {answered, 2, Connected}}},
		{"it hardly runs", []phase{
			{answered, 4, Connected}, {stopped, 3.5, Connected}, {alone, 0.5, Connected}, {stopped, 3.5, Connected}, {alone, 0.5, Connected},
			{stopped, 3.5, Connected}, {alone, 0.5, Connected}, {stopped, 3.5, Connected}, {alone, 0.5, Connected},
			{stopped, 3.5, Connected}, {alone, 0.5, Connected}, {answered, 2, Connected},
		}},
		{"it stands still after the peer has ended", []phase{{answered, 4, Connected}, {alone, 5, Connected}, {stopped, 60, Connected}, {alone, 8, Error}}},
		{"it does not come to send", []phase{{answered, 4, Connected}, {idle, 60, Connected}, {alone, 9.5, Connected}, {alone, 0.5, Error}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tr := newTracker(2*time.Second, 5)
			const look = 500 * time.Millisecond
			start := time.Unix(1000, 0)
			end, tick := start, 0 // the tick that is due
			for i, p := range tc.phases {
				end = end.Add(time.Duration(p.seconds * float64(time.Second)))
				for ; !start.Add(time.Duration(tick) * look).After(end); tick++ {
					now := start.Add(time.Duration(tick) * look)
					if p.what == stopped {
						continue
					}
					if tick%4 == 0 && p.what != idle {
						tr.send(now, false)
					}
					tr.check(now)
					if tick%4 == 0 && p.what == answered {
						tr.receive(now.Add(time.Millisecond), now)
					}
				}
				assert.Equal(t, tr.status(end).State, p.state, "phase %d, %s", i, p.what)
			}
		})
	}
}

// TestTrackerLate asks when a probe is missing.
func TestTrackerLate(t *testing.T) {
	start := time.Unix(1000, 0)
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	const after = 400 * time.Millisecond
	tr := newTracker(2*time.Second, 5)
	for _, s := range []struct {
		name    string
		do      func()
		at      int
		late    bool
		waiting time.Time
	}{
		{"nothing is on its way", func() {}, 300, false, time.Time{}},
		{"not yet", func() { tr.send(at(0), false) }, 399, false, at(0)},
		{"the first counts", func() { tr.send(at(300), false) }, 400, true, at(0)},
		{"answered late", func() { tr.receive(at(500), at(0)) }, 700, false, time.Time{}},
		{"another, and a way that takes that long", func() { tr.send(at(1000), false) }, 1999, false, at(1000)},
		{"longer than there and back twice", func() {}, 2000, true, at(1000)},
		{"a quick answer", func() { tr.receive(at(2100), at(1000)); tr.send(at(2200), true); tr.receive(at(2201), at(2200)) }, 5000, false, time.Time{}},
		{"soon again", func() { tr.send(at(5000), false) }, 5400, true, at(5000)},
	} {
		s.do()
		assert.Equal(t, tr.late(at(s.at), after), s.late, s.name)
		assert.Equal(t, tr.status(at(s.at)).Waiting, s.waiting, s.name)
	}
	for ms := 5500; ms <= 60000; ms += 500 {
		tr.send(at(ms), false)
		tr.check(at(ms))
	}
	assert.Equal(t, tr.status(at(60000)).Latency, time.Duration(0), "nobody is connected")
	assert.Equal(t, tr.status(at(60000)).RoundTrip, time.Millisecond, "and yet that is what it took")
}

// TestTrackerExtra sends more probes while one is missing. The loss is that of
// the others.
func TestTrackerExtra(t *testing.T) {
	start := time.Unix(1000, 0)
	tr := newTracker(2*time.Second, 5)
	now := start
	for i := range 10 {
		tr.send(now, false)
		if i != 4 {
			tr.receive(now.Add(time.Millisecond), now)
			assert.Equal(t, tr.extras, 0)
		} else {
			for range 3 {
				now = now.Add(500 * time.Millisecond)
				tr.send(now, true)
			}
			assert.Equal(t, tr.extras, 3)
		}
		now = now.Add(2 * time.Second)
	}
	st := tr.status(now.Add(time.Minute))
	assert.Equal(t, st.Loss, 0.1)
	assert.Equal(t, st.Sent, uint64(13))
}

// TestHurry counts the probes that a peer gets that does not answer.
func TestHurry(t *testing.T) {
	lo := netip.MustParseAddr("127.0.0.1")
	peer, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	assert.NilError(t, err)
	defer peer.Close()
	p, err := Open(t.Context(), Config{
		Peer: peer.LocalAddr().(*net.UDPAddr).AddrPort(), Listen: netip.AddrPortFrom(lo, 0), ClusterID: "rome",
		Interval: 200 * time.Millisecond, Threshold: 1000,
	})
	assert.NilError(t, err)
	assert.Equal(t, p.Hurry(), 50*time.Millisecond)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	start := time.Now()
	go func() { done <- p.Run(ctx) }()
	extras := func() int {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.track.extras
	}
	buf := make([]byte, maxMessage)
	assert.NilError(t, peer.SetReadDeadline(start.Add(time.Minute)))
	sent := 0
	read := func() {
		_, err := peer.Read(buf)
		assert.NilError(t, err)
		sent++
	}
	for extras() < maxExtras { // a machine that is busy skips some looks
		read()
	}
	for range 10 {
		read()
	}
	took := time.Since(start)
	cancel()
	assert.NilError(t, <-done)
	select {
	case <-p.Late():
	default:
		t.Error("nobody was told")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	// Not all of them: in the end they are as far apart as ever.
	assert.Equal(t, p.track.extras, maxExtras)
	assert.Assert(t, took >= time.Duration(sent-maxExtras-1)*200*time.Millisecond, "%d probes took %v", sent, took)
}

func TestTrackerForgets(t *testing.T) {
	start := time.Unix(1000, 0)
	tr := newTracker(2*time.Second, 5)
	for i := range 10 * window {
		tr.send(start.Add(time.Duration(i)*time.Second), false)
	}
	assert.Equal(t, len(tr.ring), window)
	assert.Equal(t, tr.status(start.Add(time.Hour)).Sent, uint64(10*window))
}

// TestWireFormat pins what goes over the wire: the public system reads it.
func TestWireFormat(t *testing.T) {
	m := message{ClusterID: "rome", Type: typePing, Time: time.Date(2026, 3, 14, 12, 0, 0, 123456789, time.UTC)}
	b, err := m.encode()
	assert.NilError(t, err)
	assert.Equal(t, string(b), `{"clusterID":"rome","msgType":"PING","timeStamp":"2026-03-14T12:00:00.123456789Z"}`)

	m.MTU = 1390
	b, err = m.encode()
	assert.NilError(t, err)
	assert.Equal(t, string(b), `{"clusterID":"rome","msgType":"PING","timeStamp":"2026-03-14T12:00:00.123456789Z","mtu":1390}`)

	// What a newer peer may add comes back to it.
	reply, err := answer([]byte(`{"clusterID":"rome","msgType":"PING","timeStamp":"2026-03-14T13:00:00.5+01:00","nonce":[1,2]}`))
	assert.NilError(t, err)
	var got map[string]any
	assert.NilError(t, json.Unmarshal(reply, &got))
	assert.DeepEqual(t, got, map[string]any{
		"clusterID": "rome", "msgType": "PONG", "timeStamp": "2026-03-14T13:00:00.5+01:00", "nonce": []any{1.0, 2.0},
	})

	for _, bad := range []string{``, `{}`, `[]`, `{"msgType":"PUNG"}`, `{"msgType":"PING","timeStamp":"yesterday"}`} {
		_, err := decode([]byte(bad))
		assert.ErrorContains(t, err, "conncheck", bad)
	}
}

// open returns a Prober on a free port of the address, that probes peer, and
// runs it until the test ends or the returned function is called.
func open(t *testing.T, addr netip.Addr, port uint16, peer netip.AddrPort) (*Prober, func()) {
	t.Helper()
	p, err := Open(t.Context(), Config{
		Peer: peer, Listen: netip.AddrPortFrom(addr, port), ClusterID: "rome",
		Interval: 20 * time.Millisecond, Threshold: 5,
	})
	assert.NilError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	stopped := false
	stop := func() {
		if !stopped {
			stopped = true
			cancel()
			assert.NilError(t, <-done)
		}
	}
	t.Cleanup(stop)
	return p, stop
}

// freePorts are two UDP ports that nobody has just now.
func freePorts(t *testing.T, addr netip.Addr) (uint16, uint16) {
	t.Helper()
	var ports [2]uint16
	for i := range ports {
		c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, 0)))
		if err != nil {
			nettest.SkipOrFail(t, "address "+addr.String(), err)
		}
		defer c.Close() // both at once: they are two
		ports[i] = c.LocalAddr().(*net.UDPAddr).AddrPort().Port()
	}
	return ports[0], ports[1]
}

func waitFor(t *testing.T, p *Prober, want State) Status {
	t.Helper()
	var st Status
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		if st = p.Status(); st.State == want {
			return poll.Success()
		}
		return poll.Continue("state %s, want %s", st.State, want)
	}, poll.WithDelay(5*time.Millisecond), poll.WithTimeout(time.Minute))
	return st
}

// changed takes the value that follows a change of state.
func changed(t *testing.T, p *Prober) {
	t.Helper()
	select {
	case <-p.Changed():
	case <-time.After(time.Minute):
		t.Fatal("nobody was told of the change")
	}
}

func TestTwoProbers(t *testing.T) {
	for _, addr := range []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()} {
		t.Run(addr.String(), func(t *testing.T) {
			portA, portB := freePorts(t, addr)
			a, _ := open(t, addr, portA, netip.AddrPortFrom(addr, portB))
			st := waitFor(t, a, Error) // nobody is there yet
			assert.Equal(t, st.Latency, time.Duration(0))
			assert.Equal(t, st.Received, uint64(0))
			changed(t, a)

			began := time.Now()
			b, stopB := open(t, addr, portB, netip.AddrPortFrom(addr, portA))
			st = waitFor(t, a, Connected)
			assert.Assert(t, st.Latency > 0 && st.Latency <= time.Since(began), "latency %v", st.Latency)
			waitFor(t, b, Connected)
			changed(t, a)

			stopB()
			st = waitFor(t, a, Error)
			assert.Equal(t, st.Latency, time.Duration(0))
			assert.Assert(t, !st.LastReply.IsZero())
		})
	}
}

// TestPeerMTU: each side hears what the other one has room for, at once when that
// changes; a peer that says nothing is taken at that.
func TestPeerMTU(t *testing.T) {
	lo := netip.MustParseAddr("127.0.0.1")
	portA, portB := freePorts(t, lo)
	a, _ := open(t, lo, portA, netip.AddrPortFrom(lo, portB))
	a.SetMTU(1440)
	b, _ := open(t, lo, portB, netip.AddrPortFrom(lo, portA))
	waitFor(t, a, Connected)
	waitFor(t, b, Connected)
	hears := func(p *Prober, mtu int) {
		t.Helper()
		for p.Status().PeerMTU != mtu {
			select {
			case <-p.Changed():
			case <-time.After(time.Minute):
				t.Fatalf("it has heard %d, not %d", p.Status().PeerMTU, mtu)
			}
		}
	}
	hears(b, 1440)
	assert.Equal(t, a.Status().PeerMTU, 0)
	b.SetMTU(1390)
	hears(a, 1390)
	b.SetMTU(1340)
	hears(a, 1340)
	b.SetMTU(0)
	hears(a, 0)
}

// TestRoundTrip tells of every answer once, and of nothing else.
func TestRoundTrip(t *testing.T) {
	lo := netip.MustParseAddr("127.0.0.1")
	peer, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	assert.NilError(t, err)
	defer peer.Close()
	assert.NilError(t, peer.SetReadDeadline(time.Now().Add(time.Minute)))
	took := make(chan time.Duration, 100)
	p, err := Open(t.Context(), Config{
		Peer: peer.LocalAddr().(*net.UDPAddr).AddrPort(), Listen: netip.AddrPortFrom(lo, 0), ClusterID: "rome",
		Interval: time.Hour, RoundTrip: func(d time.Duration) { took <- d },
	})
	assert.NilError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	began := time.Now()
	go func() { done <- p.Run(ctx) }()

	buf := make([]byte, maxMessage)
	n, from, err := peer.ReadFromUDPAddrPort(buf)
	assert.NilError(t, err)
	pong, err := answer(buf[:n])
	assert.NilError(t, err)
	never, err := message{ClusterID: "rome", Type: typePong, Time: time.Unix(1, 0)}.encode()
	assert.NilError(t, err)
	for _, b := range [][]byte{never, pong, pong} {
		_, err = peer.WriteToUDPAddrPort(b, from)
		assert.NilError(t, err)
	}
	select {
	case d := <-took:
		assert.Assert(t, d > 0 && d <= time.Since(began), "%v", d)
	case <-time.After(time.Minute):
		t.Fatal("nobody was told of the answer")
	}
	// A PING that is answered came after the second answer, which was read then.
	_, err = peer.WriteToUDPAddrPort([]byte(`{"clusterID":"rome","msgType":"PING","timeStamp":"2026-03-14T12:00:00Z"}`), from)
	assert.NilError(t, err)
	_, err = peer.Read(buf)
	assert.NilError(t, err)
	// The next PING is due in an hour, unless it is asked for.
	p.Probe()
	n, _, err = peer.ReadFromUDPAddrPort(buf)
	assert.NilError(t, err)
	_, err = answer(buf[:n])
	assert.NilError(t, err)
	cancel()
	assert.NilError(t, <-done)
	assert.Equal(t, len(took), 0)
}

// TestAnswered: an answer tells about the time when its probe left, however late it is read, and
// whatever becomes of the clock meanwhile.
func TestAnswered(t *testing.T) {
	start := time.Now()
	tr := newTracker(time.Second, 5)
	first := tr.send(start, false)
	second := tr.send(start.Add(time.Second), false)
	third := tr.send(start.Add(2*time.Second), false)
	now := start.Add(3 * time.Second)
	tr.receive(now, second)
	assert.Equal(t, tr.status(now).Answered, second)
	tr.receive(now, first) // overtaken
	assert.Equal(t, tr.status(now).Answered, second)
	assert.Equal(t, tr.status(now).LastReply, now)
	tr.receive(now, third)
	assert.Equal(t, tr.status(now).Answered, third)
	fourth := tr.send(start.Add(4*time.Second), false)
	tr.ring[len(tr.ring)-1].stamp -= time.Hour.Nanoseconds() // the clock was put back
	tr.receive(start.Add(5*time.Second), fourth.Add(-time.Hour))
	assert.Equal(t, tr.status(now).Answered, fourth)
}

// TestStranger: who isn't the peer gets no answer and cannot connect us.
func TestStranger(t *testing.T) {
	lo := netip.MustParseAddr("127.0.0.1")
	p, _ := open(t, lo, 0, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.2"), 9))

	port := p.LocalAddr().Port()
	stranger, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(lo, port)))
	assert.NilError(t, err)
	defer stranger.Close()
	friend, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 2)})
	assert.NilError(t, err)
	defer friend.Close()
	ping, err := message{ClusterID: "x", Type: typePing, Time: time.Now()}.encode()
	assert.NilError(t, err)

	_, err = stranger.Write(ping)
	assert.NilError(t, err)
	_, err = friend.WriteToUDPAddrPort(ping, netip.AddrPortFrom(lo, port))
	assert.NilError(t, err)
	buf := make([]byte, maxMessage)
	assert.NilError(t, friend.SetReadDeadline(time.Now().Add(time.Minute)))
	_, _, err = friend.ReadFromUDPAddrPort(buf)
	assert.NilError(t, err) // the friend's answer is there, so the stranger's would be, too
	assert.NilError(t, stranger.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
	_, err = stranger.Read(buf)
	assert.ErrorContains(t, err, "timeout")
	assert.Equal(t, p.Status().Received, uint64(0))
}

func TestConfig(t *testing.T) {
	_, err := Open(t.Context(), Config{})
	assert.ErrorContains(t, err, "Config.Peer")
}

// TestSilentHour: a tunnel that is silent for an hour ends in Error once.
func TestSilentHour(t *testing.T) {
	now := time.Unix(1000, 0)
	tr := newTracker(2*time.Second, 5)
	changes := 0
	for range 1800 {
		tr.send(now, false)
		before := tr.state
		tr.check(now)
		if tr.state != before {
			changes++
		}
		now = now.Add(2 * time.Second)
	}
	assert.Equal(t, changes, 1)
	assert.Equal(t, tr.status(now).Loss, 1.0)
}
