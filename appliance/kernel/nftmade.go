package kernel

import (
	"bytes"
	"compress/flate"
	"encoding/json"
	"io"
	"slices"

	"github.com/google/nftables/userdata"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// A table tells what it was written to translate: when it is replaced, entries
// of the connection table that it made go (netstate.Eviction), and the process
// that wrote it may be gone by then. The text is in the user data of rules of
// the digest chain, which no packet comes by.
const (
	// typeMade marks it among user data. The library knows the types up to 2;
	// nft(8) skips those that it does not know.
	typeMade userdata.Type = 0x69
	// maxMade is how much fits into one rule: NFT_USERDATA_MAXLEN without a
	// header, whose length has one byte.
	maxMade = 253
)

// encodeMade returns what a table translates, as user data of rules.
func encodeMade(made []netstate.Translation) ([][]byte, error) {
	if len(made) == 0 {
		return nil, nil
	}
	var b bytes.Buffer
	w, err := flate.NewWriter(&b, flate.BestSpeed)
	if err != nil {
		return nil, err
	}
	if err := json.NewEncoder(w).Encode(made); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	var out [][]byte
	for chunk := range slices.Chunk(b.Bytes(), maxMade) {
		out = append(out, userdata.Append(nil, typeMade, chunk))
	}
	return out, nil
}

// decodeMade is the reverse; nil if the text is not complete.
func decodeMade(text []byte) (made []netstate.Translation) {
	r := flate.NewReader(bytes.NewReader(text))
	defer r.Close()
	all, err := io.ReadAll(r)
	if err != nil || json.Unmarshal(all, &made) != nil {
		return nil
	}
	return made
}

// A madeTable is what was read of a table that has not changed since.
type madeTable struct {
	seen string
	made []netstate.Translation
}

// madeBy returns what a table with this digest translates.
func (n *nft) madeBy(id netstate.TableID, seen string, text []byte) []netstate.Translation {
	if m, ok := n.made[id]; ok && m.seen == seen {
		return m.made
	}
	m := madeTable{seen: seen}
	if len(text) > 0 {
		m.made = decodeMade(text)
	}
	n.made[id] = m
	return m.made
}
