package plan_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// Whatever objects say, even what no API server lets in: a plan is made, it is the same
// when it is made again, and no object is in it twice. An input costs some milliseconds:
// go test -fuzz FuzzPlan -fuzzminimizetime 1x.
func FuzzPlan(f *testing.F) {
	base := everything(f)
	for seed := range byte(8) {
		r := rand.New(rand.NewPCG(uint64(seed), 3))
		choices := make([]byte, 64)
		for i := range choices {
			choices[i] = byte(r.Uint32())
		}
		f.Add(choices, "text")
	}
	f.Add([]byte{}, "")
	f.Fuzz(func(t *testing.T, choices []byte, text string) {
		w := base.copied(t)
		spoil(w, &choice{rest: choices, text: text})
		first := plan.Cluster(w.snapshot())
		assert.Assert(t, reflect.DeepEqual(plan.Cluster(w.snapshot()), first))
		planned := map[string]bool{}
		for _, o := range first.Objects {
			assert.Assert(t, !planned[keyOf(o)], "%s is planned twice", keyOf(o))
			assert.Equal(t, o.GetLabels()[v1beta1.LabelManagedBy], v1beta1.ManagedBy, keyOf(o))
			planned[keyOf(o)] = true
		}
	})
}

// everything returns a cluster with an object of every kind that is planned from.
func everything(t testing.TB) *world {
	w := peered(t)
	w.namespace("paris")
	w.configure("paris", "10.10.0.0/16", "10.70.0.0/16")
	w.client("paris")
	w.namespace("oslo")
	w.endpoint("oslo", "10.40.0.0/16", "10.41.0.0/16")
	publicKey(w, "rome", "key", 32)
	w.ip("printer", "192.168.40.1", true)
	w.yaml(`
apiVersion: core.liqo.io/v1beta1
kind: ForeignCluster
metadata: {name: theirs}
spec: {clusterID: oslo}
---
apiVersion: networking.liqo.io/v1beta1
kind: RouteConfiguration
metadata: {name: own, namespace: liqo}
spec: {table: {name: own, rules: [{dst: 10.20.0.0/16, routes: [{dst: 10.20.0.0/16, dev: liqo.rome}]}]}}
---
apiVersion: networking.liqo.io/v1beta1
kind: FirewallConfiguration
metadata: {name: own, namespace: liqo}
spec: {table: {name: own, family: IPV4, chains: [{name: in, type: filter, hook: input, policy: accept, priority: 0}]}}
`)
	w.settle()
	w.kubelet("node-1", "node-2")
	w.vteps()
	w.settle()
	return w
}

// copied returns a copy of w, for another test.
func (w *world) copied(t testing.TB) *world {
	out := *w
	out.t, out.objects = t, make(map[string]plan.Object, len(w.objects))
	for k, o := range w.objects {
		out.objects[k] = o.DeepCopyObject().(plan.Object)
	}
	return &out
}

// A choice takes decisions out of bytes: 0 when there are no more.
type choice struct {
	rest []byte
	text string
}

func (c *choice) of(n int) int {
	if len(c.rest) == 0 || n <= 1 {
		return 0
	}
	b := int(c.rest[0])
	c.rest = c.rest[1:]
	if n > 256 && len(c.rest) > 0 {
		b |= int(c.rest[0]) << 8
		c.rest = c.rest[1:]
	}
	return b % n
}

// spoil changes objects as long as there are choices: fields of them become
// something else, and there are copies of them elsewhere.
func spoil(w *world, c *choice) {
	for len(c.rest) > 0 {
		names := slices.Sorted(maps.Keys(w.objects))
		if len(names) == 0 {
			return
		}
		o := w.objects[names[c.of(len(names))]]
		switch c.of(8) {
		case 0: // one more
			more := o.DeepCopyObject().(plan.Object)
			more.SetName(nasty[c.of(len(nasty))])
			if more.GetNamespace() != "" && c.of(2) == 1 {
				more.SetNamespace([]string{"liqo-tenant-rome", "liqo-tenant-paris", "liqo", "default"}[c.of(4)])
			}
			if c.of(2) == 1 {
				w.uids++
				more.SetUID(types.UID(fmt.Sprintf("uid-%d", w.uids)))
			}
			w.objects[keyOf(more)] = more
		case 1: // one less
			delete(w.objects, keyOf(o))
		case 2: // on its way out
			at := metav1.NewTime(w.clock)
			o.SetDeletionTimestamp(&at)
		case 3:
			labels := o.GetLabels()
			for _, k := range slices.Sorted(maps.Keys(labels)) {
				if c.of(2) == 1 {
					labels[k] = c.word()
				}
			}
			o.SetLabels(labels)
		default:
			v := reflect.ValueOf(o).Elem()
			for _, part := range []string{"Spec", "Status", "Data"} {
				if f := v.FieldByName(part); f.IsValid() && c.of(2) == 1 {
					c.change(f)
				}
			}
		}
	}
}

// nasty are texts that something may stumble over.
var nasty = []string{
	"", "rome", "paris", "milan", "node-1", "x", "A.B", "-", "..", "a/b", "é", "\x00", "%s", "{{", "{{ .Spec.Nothing }}", "{{ range 99999999 }}{{ end }}", "null", "true", "7",
	"10.20.0.0/16", "10.20.0.7/16", "0.0.0.0/0", "10.0.0.0/8", "255.255.255.255/32", "10.70.0.0/30", "fd00::/8", "::/0", "fd00::1/128", "::ffff:10.20.0.0/112", "10.20.0.0/33",
	"10.80.0.1", "10.70.0.0", "0.0.0.0", "255.255.255.255", "::", "::1", "fe80::1%eth0", "::ffff:10.80.0.1", "127.0.0.1", "224.0.0.1",
	"liqo-tenant-rome", "gw-rome", "liqo.rome", "wireguard-server", "NodePort", "LoadBalancer", "ClusterIP", "Connected", "vxlan", "geneve", "None", "wireguard", "65536", "-1",
	"a-name-that-is-longer-than-what-a-label-or-the-name-of-a-link-can-be-in-kubernetes-or-linux",
}

func (c *choice) word() string {
	if i := c.of(len(nasty) + 4); i < len(nasty) {
		return nasty[i]
	}
	return c.text
}

// change sets something in v, whatever it is, to something else.
func (c *choice) change(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() {
			v.Set(reflect.New(v.Type().Elem()))
		} else if c.of(4) == 0 {
			v.SetZero()
			return
		}
		c.change(v.Elem())
	case reflect.Struct:
		if at, is := v.Addr().Interface().(*metav1.Time); is {
			*at = metav1.NewTime(time.Unix(int64(c.of(1<<16))<<16, 0))
			return
		}
		var fields []int
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				fields = append(fields, i)
			}
		}
		if len(fields) > 0 {
			c.change(v.Field(fields[c.of(len(fields))]))
		}
	case reflect.Slice:
		if raw, is := v.Addr().Interface().(*json.RawMessage); is {
			*raw, _ = json.Marshal(map[string]any{"spec": map[string]string{c.word(): c.word()}})
			return
		}
		switch c.of(4) {
		case 0:
			v.SetZero()
		case 1:
			if v.Len() > 0 && v.Len() < 8 {
				v.Set(reflect.AppendSlice(v, v))
			}
		case 2:
			v.Set(reflect.Append(v, reflect.New(v.Type().Elem()).Elem()))
			c.change(v.Index(v.Len() - 1))
		default:
			if v.Len() > 0 {
				c.change(v.Index(c.of(v.Len())))
			}
		}
	case reflect.Map:
		if v.Type().Key().Kind() != reflect.String || c.of(4) == 0 {
			v.SetZero()
			return
		}
		if v.IsNil() {
			v.Set(reflect.MakeMap(v.Type()))
		}
		value := reflect.New(v.Type().Elem()).Elem()
		c.change(value)
		v.SetMapIndex(reflect.ValueOf(c.word()).Convert(v.Type().Key()), value)
	case reflect.String:
		v.SetString(c.word())
	case reflect.Bool:
		v.SetBool(!v.Bool())
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		n := []int64{0, 1, -1, 7, 1280, 1500, 65535, 65536, 1<<31 - 1, -1 << 31, 1<<63 - 1}[c.of(11)]
		if !v.OverflowInt(n) {
			v.SetInt(n)
		}
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		n := []uint64{0, 1, 255, 1<<24 - 1, 1 << 24, 1<<32 - 1, 1<<64 - 1}[c.of(7)]
		if !v.OverflowUint(n) {
			v.SetUint(n)
		}
	}
}
