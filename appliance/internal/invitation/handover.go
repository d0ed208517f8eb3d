package invitation

import "fmt"

// Fields of the Secret of a handover.
const (
	fieldOffer     = "offer"
	fieldAnswer    = "answer"
	fieldReply     = "reply"
	fieldDelivered = "delivered"
)

// A Handover is what a gateway and the controller of its cluster tell each other by one
// Secret, the only one that the gateway may write. On the inviting side the gateway writes
// the answer, the controller the reply; on the other side it is the other way round.
type Handover struct {
	Offer  *Offer  // nil: there is no temporary tunnel
	Answer *Answer // nil: none yet
	Reply  *Reply  // to that answer; nil: none yet
	// Delivered says that both sides have the accepted reply.
	Delivered bool
}

// Fields returns the data of the Secret.
func (h Handover) Fields() (map[string][]byte, error) {
	out := map[string][]byte{}
	if err := add(out, fieldOffer, h.Offer); err != nil {
		return nil, err
	}
	if err := add(out, fieldAnswer, h.Answer); err != nil {
		return nil, err
	}
	if err := add(out, fieldReply, h.Reply); err != nil {
		return nil, err
	}
	if h.Delivered {
		out[fieldDelivered] = []byte("true")
	}
	return out, nil
}

func add[M message](out map[string][]byte, field string, m *M) error {
	if m == nil {
		return nil
	}
	b, err := Encode(*m)
	out[field] = b
	return err
}

// ReadHandover reads the data of the Secret.
func ReadHandover(data map[string][]byte) (h Handover, err error) {
	if h.Offer, err = read[Offer](data, fieldOffer); err != nil {
		return Handover{}, err
	}
	if h.Answer, err = read[Answer](data, fieldAnswer); err != nil {
		return Handover{}, err
	}
	if h.Reply, err = read[Reply](data, fieldReply); err != nil {
		return Handover{}, err
	}
	h.Delivered = string(data[fieldDelivered]) == "true"
	return h, nil
}

func read[M message](data map[string][]byte, field string) (*M, error) {
	b, ok := data[field]
	if !ok {
		return nil, nil
	}
	m, err := Decode[M](b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", field, err)
	}
	return &m, nil
}
