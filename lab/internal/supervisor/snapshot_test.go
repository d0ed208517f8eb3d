package supervisor

import (
	"testing"

	"gotest.tools/v3/assert"
)

func TestWatchesAreCounted(t *testing.T) {
	got, err := countWatches(`# TYPE apiserver_longrunning_requests gauge
apiserver_longrunning_requests{component="apiserver",group="",resource="pods",scope="cluster",subresource="",verb="WATCH",version="v1"} 3
apiserver_longrunning_requests{component="apiserver",group="",resource="pods",scope="namespace",subresource="",verb="WATCH",version="v1"} 1
apiserver_longrunning_requests{component="apiserver",group="",resource="pods",scope="resource",subresource="exec",verb="CONNECT",version="v1"} 7
apiserver_longrunning_requests{component="apiserver",group="networking.liqo.io",resource="connections",scope="cluster",subresource="",verb="WATCH",version="v1beta1"} 2
apiserver_request_total{verb="WATCH",resource="pods"} 90
`)
	assert.NilError(t, err)
	assert.DeepEqual(t, got, map[string]int{"pods.": 4, "connections.networking.liqo.io": 2})
	_, err = countWatches(`apiserver_longrunning_requests{verb="WATCH",resource="pods",group=""} many`)
	assert.ErrorContains(t, err, "is not a number")
}
