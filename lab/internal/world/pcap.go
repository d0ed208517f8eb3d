package world

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"
)

// A namedCapture is a capture under the name that its host has now.
type namedCapture struct {
	host string
	*capture
}

// writePcap merges captures into one pcapng file in the order of time, with one
// interface for each host, interface name and kind of link.
func writePcap(w io.Writer, captures []namedCapture) error {
	type source struct {
		name string
		link layers.LinkType
	}
	type entry struct {
		packet
		source source
	}
	var entries []entry
	for _, c := range captures {
		packets, _ := c.between(time.Time{}, time.Time{})
		for _, p := range packets {
			link := layers.LinkTypeRaw
			if p.hasEthernet() {
				link = layers.LinkTypeEthernet
			}
			entries = append(entries, entry{p, source{c.host + ":" + c.linkName(p.ifindex), link}})
		}
	}
	slices.SortStableFunc(entries, func(a, b entry) int { return a.time.Compare(b.time) })

	ids := map[source]int{}
	var sources []source
	for _, e := range entries {
		if _, ok := ids[e.source]; !ok {
			ids[e.source] = 0
			sources = append(sources, e.source)
		}
	}
	slices.SortFunc(sources, func(a, b source) int { return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.link, b.link)) })
	if len(sources) == 0 { // a file needs one
		sources = append(sources, source{"none", layers.LinkTypeEthernet})
	}

	ng := func(s source) pcapgo.NgInterface {
		return pcapgo.NgInterface{Name: s.name, Description: s.name, LinkType: s.link, SnapLength: snapLength, TimestampResolution: 9}
	}
	out, err := pcapgo.NewNgWriterInterface(w, ng(sources[0]), pcapgo.NgWriterOptions{SectionInfo: pcapgo.NgSectionInfo{Application: "lab"}})
	if err != nil {
		return fmt.Errorf("pcapng: %w", err)
	}
	for i, s := range sources {
		ids[s] = i
		if i == 0 {
			continue
		}
		if ids[s], err = out.AddInterface(ng(s)); err != nil {
			return fmt.Errorf("pcapng: interface %s: %w", s.name, err)
		}
	}
	for _, e := range entries {
		ci := gopacket.CaptureInfo{Timestamp: e.time, CaptureLength: len(e.data), Length: max(e.length, len(e.data)), InterfaceIndex: ids[e.source]}
		if err := out.WritePacket(ci, e.data); err != nil {
			return fmt.Errorf("pcapng: %w", err)
		}
	}
	return out.Flush()
}
