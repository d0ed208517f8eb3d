package controllers

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
)

// burst is how many events of one object and type are written one after the other. After them one
// more is written every five minutes, and the others are in the log only. client-go's 25 are for who
// tells the same in each pass, which this controller does not (tell).
const burst = 100

// newRecorder writes events until stop is called.
//
// It is client-go's recorder of core/v1 events, as kubelets and Kubernetes' own controllers have
// it. That of events.k8s.io/v1, which the manager has, takes what is told of an object for one
// event whatever its text is, keeps the first text, and writes that it happened again only the
// second time and then after half an hour: who corrects an object wrongly would read what was
// wrong before. This one counts what has the same text, and writes each time when that was last.
// The tenth text of an object for one reason within ten minutes, and those that follow, are one
// event, with the last text.
func newRecorder(config *rest.Config, scheme *runtime.Scheme) (_ record.EventRecorder, stop func(), err error) {
	clients, err := typedcorev1.NewForConfig(config)
	if err != nil {
		return nil, nil, fmt.Errorf("client for events: %w", err)
	}
	broadcaster := record.NewBroadcaster(record.WithCorrelatorOptions(record.CorrelatorOptions{BurstSize: burst}))
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: clients.Events("")})
	return broadcaster.NewRecorder(scheme, corev1.EventSource{Component: name}), broadcaster.Shutdown, nil
}
