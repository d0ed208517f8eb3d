package world

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sys/unix"
)

// UDP ports of encapsulations: ours, the public system's and the standards'.
const (
	geneveOurs     = 6091
	geneveStandard = 6081
	vxlanOurs      = 4879
	vxlanStandard  = 4789
	vxlanFlannel   = 8472
)

// decoded is a packet as far as it was understood: its innermost headers, and
// what they were packed in.
type decoded struct {
	outer              string // OuterNone, OuterGeneve, OuterVXLAN
	outerSrc, outerDst netip.Addr
	src, dst           netip.AddrPort
	proto              string
	icmpError          bool // quotes another packet
	echoReply          bool // of a kernel
	syn                bool // the first packet of a TCP connection
	mss                int  // of a SYN
	payload            []byte
}

// decode reads a frame down to its innermost packet. What is not IP has only
// a proto.
func decode(p packet) decoded {
	first := gopacket.LayerType(layers.LayerTypeEthernet)
	if !p.hasEthernet() {
		switch p.protocol {
		case unix.ETH_P_IP:
			first = layers.LayerTypeIPv4
		case unix.ETH_P_IPV6:
			first = layers.LayerTypeIPv6
		default:
			return decoded{proto: "other"}
		}
	}
	var d decoded
	d.read(p.data, first)
	return d
}

func (d *decoded) read(data []byte, first gopacket.Decoder) {
	var src, dst netip.Addr
	for _, l := range gopacket.NewPacket(data, first, gopacket.DecodeOptions{Lazy: true, NoCopy: true}).Layers() {
		switch l := l.(type) {
		case *layers.ARP:
			d.proto = "arp"
		case *layers.IPv4:
			src, dst = addr(l.SrcIP), addr(l.DstIP)
			d.addresses(src, 0, dst, 0, strings.ToLower(l.Protocol.String()), l.Payload)
			if l.FragOffset > 0 {
				return
			}
		case *layers.IPv6:
			src, dst = addr(l.SrcIP), addr(l.DstIP)
			d.addresses(src, 0, dst, 0, strings.ToLower(l.NextHeader.String()), l.Payload)
		case *layers.TCP:
			d.addresses(src, uint16(l.SrcPort), dst, uint16(l.DstPort), "tcp", l.Payload)
			d.syn = l.SYN && !l.ACK
			for _, o := range l.Options {
				if d.syn && o.OptionType == layers.TCPOptionKindMSS && len(o.OptionData) == 2 {
					d.mss = int(binary.BigEndian.Uint16(o.OptionData))
				}
			}
			return
		case *layers.UDP:
			d.addresses(src, uint16(l.SrcPort), dst, uint16(l.DstPort), "udp", l.Payload)
			d.readEncapsulated(src, dst, uint16(l.DstPort), l.Payload)
			return
		case *layers.ICMPv4:
			d.addresses(src, 0, dst, 0, "icmp", l.Payload)
			t := l.TypeCode.Type()
			d.echoReply = t == layers.ICMPv4TypeEchoReply
			d.icmpError = t != layers.ICMPv4TypeEchoRequest && !d.echoReply
			return
		case *layers.ICMPv6:
			d.addresses(src, 0, dst, 0, "icmpv6", l.Payload)
			d.echoReply = l.TypeCode.Type() == layers.ICMPv6TypeEchoReply
			d.icmpError = l.TypeCode.Type() < 128 // RFC 4443: errors are below
			return
		}
	}
	if d.proto == "" {
		d.proto = "other"
	}
}

func (d *decoded) addresses(src netip.Addr, sport uint16, dst netip.Addr, dport uint16, proto string, payload []byte) {
	d.src, d.dst = netip.AddrPortFrom(src, sport), netip.AddrPortFrom(dst, dport)
	d.proto, d.payload = proto, payload
}

// readEncapsulated goes on inside Geneve and VXLAN.
func (d *decoded) readEncapsulated(src, dst netip.Addr, port uint16, payload []byte) {
	const vxlanHeader, geneveHeader = 8, 8
	switch port {
	case geneveOurs, geneveStandard:
		if len(payload) < geneveHeader || payload[0]>>6 != 0 || binary.BigEndian.Uint16(payload[2:]) != unix.ETH_P_TEB {
			return
		}
		n := geneveHeader + 4*int(payload[0]&0x3f) // options
		if len(payload) < n {
			return
		}
		d.outer, d.outerSrc, d.outerDst = OuterGeneve, src, dst
		d.read(payload[n:], layers.LayerTypeEthernet)
	case vxlanOurs, vxlanStandard, vxlanFlannel:
		if len(payload) < vxlanHeader || payload[0]&0x08 == 0 {
			return
		}
		d.outer, d.outerSrc, d.outerDst = OuterVXLAN, src, dst
		d.read(payload[vxlanHeader:], layers.LayerTypeEthernet)
	}
}

func addr(ip []byte) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}

// Markers that stand in no payload: of an ICMP error that quotes a packet with
// the token, and of an echo reply, whose payload is that of the request. The
// latter is what servers write behind the token.
const (
	MarkerError     = "!"
	MarkerEchoReply = "<"
)

// sightings are the packets of a capture that have the token in their
// innermost payload, or are the SYN that is asked for.
func (c *capture) sightings(host string, q SightingQuery) []Sighting {
	token := []byte(q.Token)
	packets, _ := c.between(q.Since, q.Until)
	var out []Sighting
	if q.SYN.IsValid() {
		for _, p := range packets {
			if d := decode(p); d.syn && d.src == q.SYN {
				s := c.sighting(host, p, d)
				s.MSS = d.mss
				out = append(out, s)
			}
		}
		return out
	}
	for _, p := range packets {
		if !bytes.Contains(p.data, token) {
			continue
		}
		d := decode(p)
		i := bytes.Index(d.payload, token)
		if i < 0 {
			continue
		}
		s := c.sighting(host, p, d)
		if rest := d.payload[i+len(token):]; len(rest) > 0 {
			s.Marker = string(rest[:1])
		}
		switch {
		case d.icmpError:
			s.Marker = MarkerError
		case d.echoReply:
			s.Marker = MarkerEchoReply
		}
		out = append(out, s)
	}
	return out
}

func (c *capture) sighting(host string, p packet, d decoded) Sighting {
	return Sighting{
		Time: p.time, Host: host, Interface: c.linkName(p.ifindex), Direction: p.direction,
		Outer: d.outer, OuterSrc: d.outerSrc, OuterDst: d.outerDst,
		Src: d.src, Dst: d.dst, Proto: d.proto, Length: p.length,
	}
}

// entered returns the packets that entered by the given interfaces, or all that
// passed when ports is nil: so a packet that a bridge passed on is there once.
// lost is as that of a ring, with what the kernel dropped up to now.
func (c *capture) entered(since, until time.Time, ports []string) (packets []packet, lost int) {
	all, lost := c.between(since, until)
	for _, p := range all {
		if ports == nil || p.direction == In && slices.Contains(ports, c.linkName(p.ifindex)) {
			packets = append(packets, p)
		}
	}
	return packets, lost
}

// count counts packets.
func (q WireQuery) count(packets []packet, lost int) WireReport {
	r := WireReport{Found: make([]int, len(q.Contains)), Lost: lost}
	flows := map[WireFlow]*WireFlow{}
	for _, p := range packets {
		r.Packets++
		r.Bytes += p.length
		for i, s := range q.Contains {
			if bytes.Contains(p.data, []byte(s)) {
				r.Found[i]++
			}
		}
		d := decodeOutermost(p)
		key := WireFlow{Proto: d.proto, Src: d.src.Addr(), Dst: d.dst.Addr(), SrcPort: d.src.Port(), DstPort: d.dst.Port()}
		f := flows[key]
		if f == nil {
			f = &WireFlow{Proto: key.Proto, Src: key.Src, Dst: key.Dst, SrcPort: key.SrcPort, DstPort: key.DstPort}
			flows[key] = f
		}
		f.Packets++
		f.Bytes += p.length
	}
	for _, f := range flows {
		r.Flows = append(r.Flows, *f)
	}
	slices.SortFunc(r.Flows, func(a, b WireFlow) int {
		return cmp.Or(-cmp.Compare(a.Packets, b.Packets), strings.Compare(a.Proto, b.Proto), a.Src.Compare(b.Src), a.Dst.Compare(b.Dst),
			cmp.Compare(a.SrcPort, b.SrcPort), cmp.Compare(a.DstPort, b.DstPort))
	})
	return r
}

// decodeOutermost is what the wire shows: decode without going into
// encapsulations.
func decodeOutermost(p packet) decoded {
	d := decode(p)
	if d.outer == OuterNone {
		return d
	}
	port := uint16(geneveOurs)
	if d.outer == OuterVXLAN {
		port = vxlanOurs
	}
	return decoded{proto: "udp", src: netip.AddrPortFrom(d.outerSrc, 0), dst: netip.AddrPortFrom(d.outerDst, port)}
}

func sortSightings(s []Sighting) {
	slices.SortStableFunc(s, func(a, b Sighting) int { return a.Time.Compare(b.Time) })
}
