package exchange

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"gotest.tools/v3/assert"
)

// cmpPrefix compares networks by their text.
var cmpPrefix = cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })

func prefixes(texts ...string) []netip.Prefix {
	out := []netip.Prefix{}
	for _, text := range texts {
		out = append(out, netip.MustParsePrefix(text))
	}
	return out
}

// full has every field.
func full() Message {
	return Message{
		Version: Version, Program: "v0.4.0-12-gabc", Features: []string{"mtu"}, MTU: 1390,
		Networks: &Networks{Pod: prefixes("10.0.0.0/16", "fd00::/64"), External: prefixes("10.70.0.0/16")},
		Endpoint: &Endpoint{Addresses: []string{"192.0.2.7", "2001:db8::7", "gw.example.org"}, Port: 31840},
	}
}

func TestMessage(t *testing.T) {
	b, err := Encode(full())
	assert.NilError(t, err)
	assert.Equal(t, string(b), `{"version":1,"program":"v0.4.0-12-gabc","features":["mtu"],"networks":{"pod":["10.0.0.0/16","fd00::/64"],"external":["10.70.0.0/16"]},`+
		`"endpoint":{"addresses":["192.0.2.7","2001:db8::7","gw.example.org"],"port":31840},"mtu":1390}`+"\n")
	m, err := Read(bytes.NewReader(append(b, "and more"...)))
	assert.NilError(t, err)
	assert.Check(t, m.Equal(full()), "%+v", m)

	for i, change := range []func(*Message){
		func(m *Message) { m.Program = "v1" },
		func(m *Message) { m.Features = nil },
		func(m *Message) { m.MTU = 0 },
		func(m *Message) { m.Networks = nil },
		func(m *Message) { m.Networks.Pod = m.Networks.Pod[:1] },
		func(m *Message) { m.Networks.External = nil },
		func(m *Message) { m.Endpoint = nil },
		func(m *Message) { m.Endpoint.Port = 1 },
		func(m *Message) { m.Endpoint.Addresses = m.Endpoint.Addresses[1:] },
	} {
		m := full()
		change(&m)
		assert.Check(t, !m.Equal(full()) && !full().Equal(m), "change %d makes no difference", i)
	}
}

// TestNewer reads what a gateway of a later version may write.
func TestNewer(t *testing.T) {
	m, err := Decode([]byte(`{"version":7,"program":"v9","mtu":1390,"mood":{"good":true},"networks":{"pod":["10.0.0.0/16"],"service":["10.96.0.0/12"]}}`))
	assert.NilError(t, err)
	assert.DeepEqual(t, m.Networks.Pod, prefixes("10.0.0.0/16"), cmpPrefix)
	assert.Equal(t, m.Version, 7)
}

func TestRefused(t *testing.T) {
	many := func(n int, format string) string {
		var out []string
		for i := range n {
			out = append(out, fmt.Sprintf(format, i))
		}
		b, _ := json.Marshal(out)
		return string(b)
	}
	with := func(fields string) string { return `{"version":1,"program":"v1",` + fields + `}` }
	for _, tt := range []struct{ name, text, want string }{
		{"nothing", ``, "is not what a gateway says"},
		{"no version", `{"program":"v1"}`, "version: is missing"},
		{"no program", `{"version":1}`, "program:"},
		{"a line in the program", `{"version":1,"program":"v1\nx"}`, "program:"},
		{"a long program", `{"version":1,"program":"` + strings.Repeat("v", 65) + `"}`, "program:"},
		{"two messages", `{"version":1,"program":"v1"}{}`, "more after the end"},
		{"too long", with(`"x":"` + strings.Repeat("x", MaxMessage) + `"`), "at most 4096"},
		{"features", with(`"features":` + many(17, "f%d")), "features: has 17"},
		{"a feature", with(`"features":["F F"]`), "features: has one"},
		{"mtu", with(`"mtu":495`), "mtu: 495"},
		{"huge mtu", with(`"mtu":65536`), "mtu: 65536"},
		{"networks", with(`"networks":{"pod":` + many(33, "10.%d.0.0/16") + `}`), "networks.pod: has 33"},
		{"host bits", with(`"networks":{"pod":["10.0.0.1/16"]}`), "networks.pod[0]"},
		{"no prefix", with(`"networks":{"external":[""]}`), "networks.external[0]"},
		{"overlap", with(`"networks":{"pod":["10.0.0.0/16","10.0.1.0/24"]}`), "networks.pod[1]: 10.0.1.0/24 overlaps"},
		{"port", with(`"endpoint":{"addresses":["192.0.2.1"]}`), "endpoint.port"},
		{"large port", with(`"endpoint":{"addresses":["192.0.2.1"],"port":65536}`), "is not what a gateway says"},
		{"no address", with(`"endpoint":{"port":1}`), "endpoint.addresses: has 0"},
		{"addresses", with(`"endpoint":{"port":1,"addresses":` + many(9, "192.0.2.%d") + `}`), "endpoint.addresses: has 9"},
		{"twice", with(`"endpoint":{"port":1,"addresses":["a.b","a.b"]}`), "endpoint.addresses[1]: is there twice"},
		{"loopback", with(`"endpoint":{"port":1,"addresses":["127.0.0.1"]}`), "endpoint.addresses[0]"},
		{"mapped loopback", with(`"endpoint":{"port":1,"addresses":["::ffff:127.0.0.1"]}`), "endpoint.addresses[0]"},
		{"metadata", with(`"endpoint":{"port":1,"addresses":["169.254.169.254"]}`), "endpoint.addresses[0]"},
		{"zone", with(`"endpoint":{"port":1,"addresses":["fd00::1%eth0"]}`), "endpoint.addresses[0]"},
		{"slip", with(`"endpoint":{"port":1,"addresses":["192.0.2.256"]}`), "endpoint.addresses[0]"},
		{"slip with a dot", with(`"endpoint":{"port":1,"addresses":["192.0.2.256."]}`), "endpoint.addresses[0]"},
		{"long name", with(`"endpoint":{"port":1,"addresses":["` + strings.Repeat("a.", 127) + `b"]}`), "endpoint.addresses[0]"},
		{"space", with(`"endpoint":{"port":1,"addresses":["a b"]}`), "endpoint.addresses[0]"},
	} {
		_, err := Decode([]byte(tt.text))
		assert.Check(t, err != nil, tt.name)
		if err != nil {
			assert.Check(t, strings.Contains(err.Error(), tt.want), "%s: %v", tt.name, err)
		}
	}
	_, err := Read(strings.NewReader(strings.Repeat("x", 2*MaxMessage)))
	assert.ErrorContains(t, err, "more than 4096 bytes")
	_, err = Read(strings.NewReader(`{"version":1`))
	assert.ErrorContains(t, err, "ends too soon")
}

// TestTooMuch: what would be refused is not sent.
func TestTooMuch(t *testing.T) {
	m := full()
	m.Networks.Pod = nil
	for i := range MaxNetworks {
		m.Networks.Pod = append(m.Networks.Pod, netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 15: byte(i)}), 128))
	}
	m.Endpoint.Addresses = nil
	for i := range MaxAddresses {
		m.Endpoint.Addresses = append(m.Endpoint.Addresses, fmt.Sprintf("%d%s", i, strings.Repeat(".aaaaaaaaaaaaaaaaaaaaaaaaaaaaa", 8)))
	}
	_, err := Encode(m)
	assert.NilError(t, err) // the largest that there is in earnest
	long := [16]byte{0xfd, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa}
	for i := range MaxNetworks {
		long[15] = 0x10 + byte(i)
		m.Networks.External = append(m.Networks.External, netip.PrefixFrom(netip.AddrFrom16(long), 128))
	}
	m.Networks.External = m.Networks.External[1:]
	m.Networks.Pod = m.Networks.External
	for i := range m.Endpoint.Addresses {
		m.Endpoint.Addresses[i] += ".aaaaaaaaaaa"
	}
	m.Features = nil
	for i := range MaxFeatures {
		m.Features = append(m.Features, fmt.Sprintf("a-feature-with-a-long-name-%d", i))
	}
	_, err = Encode(m)
	assert.ErrorContains(t, err, "at most 4096")
	m.MTU = 3
	_, err = Encode(m)
	assert.ErrorContains(t, err, "mtu: 3")
}

// TestNew: what can't be told is left out before the message would be refused.
func TestNew(t *testing.T) {
	many := make([]netip.Prefix, MaxNetworks+1)
	for i := range many {
		many[i] = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i)}), 16)
	}
	for _, tt := range []struct {
		name          string
		pod, external []netip.Prefix
		told          bool
	}{
		{"none", nil, nil, false},
		{"pods only", many[:MaxNetworks], nil, true},
		{"too many", many, nil, false},
		{"too many external", nil, many, false},
		{"overlap", prefixes("10.0.0.0/8", "10.1.0.0/16"), nil, false},
	} {
		n := NewNetworks(tt.pod, tt.external)
		assert.Equal(t, n != nil, tt.told, tt.name)
		if tt.told {
			_, err := Encode(Message{Program: "v1", Networks: n})
			assert.NilError(t, err, tt.name)
		}
	}
	e := NewEndpoint([]string{"192.0.2.1", "169.254.1.1", "192.0.2.1", "a", "b", "c", "d", "e", "f", "g", "h"}, 5)
	assert.DeepEqual(t, e.Addresses, []string{"192.0.2.1", "a", "b", "c", "d", "e", "f", "g"})
	assert.Check(t, NewEndpoint([]string{"192.0.2.1"}, 0) == nil)
	assert.Check(t, NewEndpoint([]string{"127.0.0.1"}, 5) == nil)
}

// TestMeet has both ends of a connection speak at once.
func TestMeet(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	assert.NilError(t, err)
	defer l.Close()
	type result struct {
		m   Message
		err error
	}
	heard := make(chan result, 1)
	server := Message{Program: "server"}
	go func() {
		c, err := l.Accept()
		if err != nil {
			heard <- result{err: err}
			return
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		m, err := Meet(c, server)
		heard <- result{m, err}
	}()
	c, err := net.Dial("tcp", l.Addr().String())
	assert.NilError(t, err)
	defer c.Close()
	assert.NilError(t, c.SetDeadline(time.Now().Add(time.Minute)))
	m, err := Meet(c, full())
	assert.NilError(t, err)
	assert.Check(t, m.Equal(server), "%+v", m)
	r := <-heard
	assert.NilError(t, r.err)
	assert.Check(t, r.m.Equal(full()), "%+v", r.m)

	_, err = Meet(c, Message{})
	assert.ErrorContains(t, err, "what this gateway tells: program")
}
