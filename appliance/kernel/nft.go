package kernel

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	nl "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// compilerVersion is part of the digest in the kernel: a version of this
// package that compiles rules differently replaces the tables of the one
// before.
const compilerVersion = "3:"

// families are those of the kernel.
var families = map[netstate.Family]nftables.TableFamily{
	netstate.FamilyINET:   nftables.TableFamilyINet,
	netstate.FamilyIPv4:   nftables.TableFamilyIPv4,
	netstate.FamilyIPv6:   nftables.TableFamilyIPv6,
	netstate.FamilyARP:    nftables.TableFamilyARP,
	netstate.FamilyBridge: nftables.TableFamilyBridge,
}

// inetHooks are the numbers of the IP families, and of bridges, which have the
// same (linux/netfilter_bridge.h).
var inetHooks = map[string]nftables.ChainHook{
	"prerouting": unix.NF_INET_PRE_ROUTING, "input": unix.NF_INET_LOCAL_IN, "forward": unix.NF_INET_FORWARD,
	"output": unix.NF_INET_LOCAL_OUT, "postrouting": unix.NF_INET_POST_ROUTING,
}

// hooks are the numbers of the hooks of each family.
var hooks = map[netstate.Family]map[string]nftables.ChainHook{
	netstate.FamilyINET:   inetHooks,
	netstate.FamilyIPv4:   inetHooks,
	netstate.FamilyIPv6:   inetHooks,
	netstate.FamilyBridge: inetHooks,
	netstate.FamilyARP:    {"input": 0, "output": 1}, // linux/netfilter_arp.h
}

// An nft is two sockets of nftables: one to read, one to write.
type nft struct {
	read, write *nl.Conn
	// edited holds the tables of ours that somebody else has touched.
	edited map[netstate.TableID]bool
	made   map[netstate.TableID]madeTable
}

func openNFT() (*nft, error) {
	n := &nft{edited: map[netstate.TableID]bool{}, made: map[netstate.TableID]madeTable{}}
	var err error
	if n.read, err = nl.Dial(unix.NETLINK_NETFILTER, nil); err != nil {
		return nil, fmt.Errorf("open nftables socket: %w", err)
	}
	if n.write, err = nl.Dial(unix.NETLINK_NETFILTER, nil); err != nil {
		return nil, fmt.Errorf("open nftables socket: %w", errors.Join(err, n.read.Close()))
	}
	enlarge(n.read)
	enlarge(n.write)
	return n, nil
}

func (n *nft) close() error { return errors.Join(n.read.Close(), n.write.Close()) }

// apply replaces and deletes tables, all in one transaction. Only when the
// sockets are too small for that, each table has one of its own.
func (n *nft) apply(set []netstate.Table, del []netstate.TableID) []error {
	var errs []error
	valid := make([]netstate.Table, 0, len(set))
	for _, t := range set {
		if err := t.Validate(); err != nil {
			errs = append(errs, fmt.Errorf("table %s: %w", t.ID(), err))
			continue
		}
		valid = append(valid, t)
	}
	if len(valid)+len(del) == 0 {
		return errs
	}
	err := n.transact(valid, del)
	if err == nil {
		return errs
	}
	if len(valid)+len(del) == 1 {
		return append(errs, explainNFT(valid, del, err))
	}
	// One table that the kernel refuses must not hold back the others.
	for _, t := range valid {
		if err := n.transact([]netstate.Table{t}, nil); err != nil {
			errs = append(errs, explainNFT([]netstate.Table{t}, nil, err))
		}
	}
	for _, id := range del {
		if err := n.transact(nil, []netstate.TableID{id}); err != nil {
			errs = append(errs, explainNFT(nil, []netstate.TableID{id}, err))
		}
	}
	return errs
}

func explainNFT(set []netstate.Table, del []netstate.TableID, err error) error {
	what := "delete table "
	for _, t := range set {
		del = append(del, t.ID())
		what = "table "
	}
	switch {
	case errors.Is(err, unix.EMSGSIZE):
		err = fmt.Errorf("%w: one transaction is larger than the socket buffer: raise net.core.wmem_max or run with CAP_NET_ADMIN in the initial user namespace", err)
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOENT), errors.Is(err, unix.EAFNOSUPPORT),
		errors.Is(err, unix.EPROTO): // a family whose connections the kernel does not track
		family, expressions := partsOf(del[0].Family)
		err = fmt.Errorf("%w: the kernel lacks %s or one of the expressions used (%s): %w", ErrUnsupported, family, expressions, err)
	}
	return fmt.Errorf("%s%s: %w", what, del[0], err)
}

// partsOf names the parts of the kernel that tables of a family need: for the
// family, and for what rules of it may have.
func partsOf(f netstate.Family) (family, expressions string) {
	switch f {
	case netstate.FamilyARP:
		return "nftables for ARP (CONFIG_NF_TABLES_ARP)", "module nf_tables"
	case netstate.FamilyBridge:
		return "nftables for bridges (CONFIG_NF_TABLES_BRIDGE)", "modules nft_reject_bridge for reject, nf_conntrack_bridge for marks of connections"
	}
	return "nftables (module nf_tables)", "modules nft_ct, nft_chain_nat, nft_masq, nft_reject…"
}

// transact replaces and deletes tables in one transaction: packets see the
// old rules or the new ones, never neither.
func (n *nft) transact(set []netstate.Table, del []netstate.TableID) error {
	b, err := newBatch()
	if err != nil {
		return err
	}
	var setID uint32
	for _, id := range del {
		b.deleteTable(id)
	}
	for _, t := range set {
		table := b.deleteTable(t.ID())
		b.AddTable(table)
		if err := b.fill(table, t, &setID); err != nil {
			return err
		}
	}
	err = n.commit(b)
	if errors.Is(err, unix.ENOBUFS) && n.holds(set, del) {
		return nil // only the answers were lost
	}
	if err == nil {
		for _, t := range set {
			delete(n.edited, t.ID())
		}
	}
	return err
}

// deleteTable deletes a table whether it is there or not:
//
//	add table ip isthmus-x
//	delete table ip isthmus-x
func (b *batch) deleteTable(id netstate.TableID) *nftables.Table {
	t := &nftables.Table{Name: TablePrefix + id.Name, Family: families[id.Family]}
	b.AddTable(t)
	b.DelTable(t)
	return t
}

func (b *batch) fill(table *nftables.Table, t netstate.Table, setID *uint32) error {
	c := compiler{family: t.Family, addSet: func(set nftables.Set, elements []nftables.SetElement) (*nftables.Set, error) {
		*setID++
		set.Table, set.ID = table, *setID
		return &set, b.addSet(&set, elements)
	}}
	for _, ch := range t.Chains {
		policy := nftables.ChainPolicyAccept
		if ch.Policy == "drop" {
			policy = nftables.ChainPolicyDrop
		}
		chain := b.AddChain(&nftables.Chain{
			Table: table, Name: ch.Name, Type: nftables.ChainType(ch.Type),
			Hooknum: nftables.ChainHookRef(hooks[t.Family][ch.Hook]), Priority: nftables.ChainPriorityRef(nftables.ChainPriority(ch.Priority)),
			Policy: &policy,
		})
		for i, r := range ch.Rules {
			exprs, err := c.rule(r)
			if err != nil {
				return fmt.Errorf("chain %s rule %d %s: %w", ch.Name, i, r.Name, err)
			}
			b.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: exprs, UserData: comment(r.Name)})
		}
	}
	digest := b.AddChain(&nftables.Chain{Table: table, Name: netstate.DigestChain})
	b.AddRule(&nftables.Rule{
		Table: table, Chain: digest,
		Exprs:    []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}},
		UserData: comment(compilerVersion + t.Digest()),
	})
	made, err := encodeMade(t.Translations())
	if err != nil {
		return err
	}
	for _, text := range made {
		b.AddRule(&nftables.Rule{
			Table: table, Chain: digest,
			Exprs:    []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}},
			UserData: text,
		})
	}
	return nil
}

// addSet adds an anonymous set or map with its elements. The size of an
// attribute of netlink has 16 bits, so there may be several messages for them.
// Nobody can change the elements once a rule uses them; the kernel refuses that
// for anonymous sets.
func (b *batch) addSet(set *nftables.Set, elements []nftables.SetElement) error {
	set.Anonymous, set.Constant = true, true
	set.Name = "__set%d"
	if set.IsMap {
		set.Name = "__map%d"
	}
	chunk := maxElements(elements)
	if len(elements) <= chunk {
		return b.AddSet(set, elements)
	}
	set.Size = uint32(len(elements)) // else it would be that of the first message
	if err := b.AddSet(set, elements[:chunk]); err != nil {
		return err
	}
	more := *set
	more.Anonymous = false // the library thinks that it is too late for more
	for es := range slices.Chunk(elements[chunk:], chunk) {
		if err := b.SetAddElements(&more, es); err != nil {
			return err
		}
	}
	return nil
}

// maxElements returns how many of the elements fit into one message.
func maxElements(elements []nftables.SetElement) int {
	// Headers of attributes: the element, its key, its value, both once more
	// for the data in them, flags with their value, the comment and what is
	// around its text.
	const headers = 4 + 2*(4+4) + (4 + 4) + (4 + 3)
	largest := 1
	for _, e := range elements {
		largest = max(largest, headers+len(e.Key)+len(e.Val)+len(e.Comment)+8) // 8: padding
	}
	return 60_000 / largest
}

// comment is what nft(8) shows as a rule's comment.
func comment(s string) []byte {
	if s == "" {
		return nil
	}
	return userdata.AppendString(nil, userdata.TypeComment, s)
}

// holds reports whether the tables are as a transaction should have left
// them.
func (n *nft) holds(set []netstate.Table, del []netstate.TableID) bool {
	have, err := n.observe()
	if err != nil {
		return false
	}
	observed, desired := netstate.State{}, netstate.State{Tables: set}
	for _, t := range have {
		for _, w := range set {
			if t.ID() == w.ID() {
				observed.Tables = append(observed.Tables, t)
			}
		}
		for _, id := range del {
			if t.ID() == id {
				return false
			}
		}
	}
	return netstate.Diff(observed, desired).Empty()
}

// observe returns our tables: their digests, their chains and the names of
// the rules in them.
func (n *nft) observe() ([]netstate.Table, error) {
	for try := range dumpTries {
		letWrite(try)
		before, err := n.generation()
		if err != nil {
			return nil, err
		}
		tables, again, err := n.observeOnce()
		if err != nil {
			return nil, err
		}
		if after, err := n.generation(); err != nil {
			return nil, err
		} else if !again && before == after {
			return tables, nil
		}
	}
	return nil, fmt.Errorf("list tables: they changed %d times while they were read", dumpTries)
}

// generation returns a number that every transaction of anybody changes.
func (n *nft) generation() (id uint32, err error) {
	msgs, err := n.read.Execute(nl.Message{
		Header: nl.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN, Flags: nl.Request},
		Data:   []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0},
	})
	if noNFTables(err) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("generation of nftables: %w", plain(err))
	}
	for _, m := range msgs {
		id = generationOf(m.Data)
	}
	return id, nil
}

// generationOf returns the number in a message about a generation.
func generationOf(b []byte) (id uint32) {
	if len(b) < 4 {
		return 0
	}
	eachAttr(b[4:], func(t uint16, v []byte) {
		if t == unix.NFTA_GEN_ID && len(v) == 4 {
			id = binaryutil.BigEndian.Uint32(v)
		}
	})
	return id
}

// noNFTables reports whether an error says that the kernel has none.
func noNFTables(err error) bool {
	return errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPROTONOSUPPORT)
}

func (n *nft) observeOnce() (tables []netstate.Table, again bool, err error) {
	msgs, err := n.dump(unix.NFT_MSG_GETTABLE, 0, nil)
	if noNFTables(err) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("list tables: %w", err)
	}
	for _, m := range msgs {
		if id, ok := tableOf(m.Data); ok {
			if slices.ContainsFunc(tables, func(t netstate.Table) bool { return t.ID() == id }) {
				return nil, true, nil // the old one and the new one, at the moment of a commit
			}
			tables = append(tables, netstate.Table{Family: id.Family, Name: id.Name, Seen: "none"})
		}
	}
	if len(tables) == 0 {
		return nil, false, nil
	}
	if msgs, err = n.dump(unix.NFT_MSG_GETCHAIN, 0, nil); err != nil {
		return nil, false, fmt.Errorf("list chains: %w", err)
	}
	for _, m := range msgs {
		id, ok := tableOf(m.Data)
		if !ok {
			continue
		}
		i := slices.IndexFunc(tables, func(t netstate.Table) bool { return t.ID() == id })
		if i < 0 {
			return nil, true, nil
		}
		c := parseChain(id.Family, m.Data)
		if slices.ContainsFunc(tables[i].Chains, func(o netstate.Chain) bool { return o.Name == c.Name }) {
			return nil, true, nil
		}
		tables[i].Chains = append(tables[i].Chains, c)
	}
	for i := range tables {
		t := &tables[i]
		var a attrs
		a.str(unix.NFTA_RULE_TABLE, TablePrefix+t.Name)
		msgs, err = n.dump(unix.NFT_MSG_GETRULE, byte(families[t.Family]), a.b)
		if errors.Is(err, unix.ENOENT) {
			return nil, true, nil
		}
		if err != nil {
			return nil, false, fmt.Errorf("list rules of table %s: %w", t.ID(), err)
		}
		var made []byte
		for _, m := range msgs {
			chain, name, more := parseFirewallRule(m.Data)
			if chain == netstate.DigestChain {
				if name != "" {
					t.Seen = strings.TrimPrefix(name, compilerVersion)
				}
				made = append(made, more...)
				continue
			}
			for j := range t.Chains {
				if t.Chains[j].Name == chain {
					t.Chains[j].Rules = append(t.Chains[j].Rules, netstate.FirewallRule{Name: name})
				}
			}
		}
		if n.edited[t.ID()] {
			t.Seen = "edited" // nobody knows what it translated since
		} else {
			t.Made = n.madeBy(t.ID(), t.Seen, made)
		}
		for j, c := range t.Chains {
			if c.Name == netstate.DigestChain {
				t.Chains = append(t.Chains[:j], t.Chains[j+1:]...)
				break
			}
		}
	}
	return tables, false, nil
}

// dump lists things of nftables.
func (n *nft) dump(typ uint16, family byte, data []byte) ([]nl.Message, error) {
	return dump(n.read, unix.NFNL_SUBSYS_NFTABLES<<8|typ, append([]byte{family, unix.NFNETLINK_V0, 0, 0}, data...))
}

// tableOf returns the table that a message is about, if it is ours. In every
// message of nftables the first attribute is the table's name.
func tableOf(b []byte) (netstate.TableID, bool) {
	const nfgenmsg = 4
	if len(b) < nfgenmsg {
		return netstate.TableID{}, false
	}
	var id netstate.TableID
	for f, n := range families {
		if byte(n) == b[0] {
			id.Family = f
		}
	}
	ours := false
	eachAttr(b[nfgenmsg:], func(t uint16, v []byte) {
		if t == unix.NFTA_TABLE_NAME {
			id.Name, ours = strings.CutPrefix(asString(v), TablePrefix)
		}
	})
	return id, ours && id.Family != ""
}

// counted returns how many packets the counters in a table of ours have seen, by the
// names of their rules.
func (n *nft) counted(id netstate.TableID) (map[string]uint64, error) {
	var a attrs
	a.str(unix.NFTA_RULE_TABLE, TablePrefix+id.Name)
	msgs, err := n.dump(unix.NFT_MSG_GETRULE, byte(families[id.Family]), a.b)
	if err == nil && len(msgs) == 0 {
		err = unix.ENOENT // every table of ours has a rule with its digest
	}
	if err != nil {
		return nil, fmt.Errorf("list rules of table %s: %w", id, err)
	}
	packets := map[string]uint64{}
	for _, m := range msgs {
		_, name, _ := parseFirewallRule(m.Data)
		eachAttr(m.Data[4:], func(t uint16, v []byte) {
			if t == unix.NFTA_RULE_EXPRESSIONS {
				eachAttr(v, func(_ uint16, v []byte) {
					if n, ok := counterOf(v); ok {
						packets[name] += n
					}
				})
			}
		})
	}
	return packets, nil
}

// counterOf returns the packets of an expression, if it is a counter.
func counterOf(b []byte) (packets uint64, counter bool) {
	eachAttr(b, func(t uint16, v []byte) {
		switch {
		case t == unix.NFTA_EXPR_NAME:
			counter = asString(v) == "counter"
		case t == unix.NFTA_EXPR_DATA && counter:
			eachAttr(v, func(t uint16, v []byte) {
				if t == unix.NFTA_COUNTER_PACKETS && len(v) == 8 {
					packets = binaryutil.BigEndian.Uint64(v)
				}
			})
		}
	})
	return packets, counter
}

func parseChain(f netstate.Family, b []byte) netstate.Chain {
	var c netstate.Chain
	eachAttr(b[4:], func(t uint16, v []byte) {
		switch t {
		case unix.NFTA_CHAIN_NAME:
			c.Name = asString(v)
		case unix.NFTA_CHAIN_TYPE:
			c.Type = asString(v)
		case unix.NFTA_CHAIN_POLICY:
			c.Policy = "accept"
			if len(v) == 4 && v[3] == 0 {
				c.Policy = "drop"
			}
		case unix.NFTA_CHAIN_HOOK:
			eachAttr(v, func(t uint16, v []byte) {
				if len(v) != 4 {
					return
				}
				switch n := binaryutil.BigEndian.Uint32(v); t {
				case unix.NFTA_HOOK_HOOKNUM:
					for name, h := range hooks[f] {
						if uint32(h) == n {
							c.Hook = name
						}
					}
				case unix.NFTA_HOOK_PRIORITY:
					c.Priority = int32(n)
				}
			})
		}
	})
	return c
}

// parseFirewallRule returns the chain of a rule, its comment, and what it tells
// of the table.
func parseFirewallRule(b []byte) (chain, name string, made []byte) {
	eachAttr(b[4:], func(t uint16, v []byte) {
		switch t {
		case unix.NFTA_RULE_CHAIN:
			chain = asString(v)
		case unix.NFTA_RULE_USERDATA:
			name, _ = userdata.GetString(v, userdata.TypeComment)
			made = userdata.Get(v, typeMade)
		}
	})
	return chain, name, made
}
