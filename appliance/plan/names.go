package plan

import (
	"crypto/sha256"
	"encoding/base32"
	"slices"
	"strconv"
	"strings"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// Longest names of the API.
const (
	maxName  = 253 // of most objects (RFC 1123 subdomain)
	maxLabel = 63  // of labels' values and of Services (RFC 1123 label)
	maxIface = 15  // of network interfaces (IFNAMSIZ-1)
	hashLen  = 10  // characters of a hash in a name: 50 bits
)

// hash returns ten lower-case letters and digits that stand for s.
func hash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return strings.ToLower(base32.StdEncoding.EncodeToString(sum[:])[:hashLen])
}

// shorten returns s if it has at most limit bytes, else its beginning and a
// hash of the whole.
func shorten(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	return strings.TrimRight(s[:limit-hashLen-1], "-.") + "-" + hash(s)
}

// Name joins parts with hyphens to the name of an object. A name that the API
// would refuse as too long ends in a hash of itself instead.
func Name(parts ...string) string { return shorten(strings.Join(parts, "-"), maxName) }

// Label returns the value of a label that stands for s: s, or its beginning
// and a hash if it is longer than a label may be.
func Label(s string) string { return shorten(s, maxLabel) }

// GatewayName returns the name of what belongs to the gateway of this name: its
// Deployment, Service, Secret, Connection and report.
func GatewayName(gateway string) string {
	return shorten(v1beta1.GatewayNamePrefix+gateway, maxLabel)
}

// HandoverName returns the name of the Secret by which the gateway of this name takes part
// in an invitation.
func HandoverName(gateway string) string { return GatewayName(gateway) + "-handover" }

// RotationName returns the name of the Secret by which the gateway of this name takes part
// in changes of keys.
func RotationName(gateway string) string { return GatewayName(gateway) + "-rotation" }

// interfaceName returns the name of a network interface that stands for an
// object of this kind with this ID. Attempts above 0 give other names, for when
// a hash is taken.
func interfaceName(kind, id string, attempt int) string {
	const reserved = "vxlan host" // names of the VXLAN overlay's own links
	plain := attempt == 0 && id != "" && len(id) <= maxIface-len(v1beta1.InterfaceNamePrefix) &&
		strings.Trim(id, "abcdefghijklmnopqrstuvwxyz0123456789-") == "" &&
		!slices.Contains(strings.Fields(reserved), id)
	if plain {
		return v1beta1.InterfaceNamePrefix + id
	}
	seed := kind + "/" + id
	if attempt > 1 {
		seed += "/" + strconv.Itoa(attempt)
	}
	return v1beta1.InterfaceNamePrefix + hash(seed)
}

// An ifaceUser is somebody who needs the name of a network interface.
type ifaceUser struct{ id, has string }

// interfaceNames returns a different name for every user, by ID. Users are in
// the order in which they are served; those who have a usable name of their
// own keep it, the first one if two have the same. Names in taken belong to
// objects that are going away.
func interfaceNames(kind string, users []ifaceUser, taken map[string]bool) map[string]string {
	names, used := make(map[string]string, len(users)), make(map[string]bool, len(users))
	for _, u := range users {
		if usableInterface(u.has) && !used[u.has] {
			names[u.id], used[u.has] = u.has, true
		}
	}
	for _, u := range users {
		for attempt := 0; names[u.id] == ""; attempt++ {
			if name := interfaceName(kind, u.id, attempt); !used[name] && !taken[name] {
				names[u.id], used[name] = name, true
			}
		}
	}
	return names
}

// usableInterface reports whether name may be that of a link of ours.
func usableInterface(name string) bool {
	rest, ours := strings.CutPrefix(name, v1beta1.InterfaceNamePrefix)
	return ours && rest != "" && len(name) <= maxIface && !strings.ContainsAny(rest, "/: \t\n")
}
