package main

import (
	"context"
	"testing"

	"gotest.tools/v3/assert"
)

// TestProcessors: what processors do when they wait for a disk counts as idle,
// what others take from a virtual machine does not, and what can't be read is no
// room.
func TestProcessors(t *testing.T) {
	before := parseProcessors("cpu  100 0 50 800 10 0 5 35 20 0")
	assert.Equal(t, before, processors{idle: 810, all: 1000})
	for _, tt := range []struct {
		name, line string
		want       float64
	}{
		{"half of it", "cpu  200 0 50 895 15 0 5 35 20 0", 0.5},
		{"all of it", "cpu  100 0 50 900 10 0 5 35 20 0", 1},
		{"stolen", "cpu  100 0 50 825 10 0 5 110 20 0", 0.25},
		{"no time has passed", "cpu  100 0 50 800 10 0 5 35 20 0", 0},
		{"not what it should be", "cpu0 1 2 3", 0},
		{"no number", "cpu  x 0 50 900 10 0 5 35 20 0", 0},
	} {
		assert.Equal(t, parseProcessors(tt.line).idleSince(before), tt.want, tt.name)
	}
	assert.Assert(t, readProcessors().all > 0)
}

// TestWaitForRoom: nobody waits for room when there is nothing to run, or
// nobody wants it any more.
func TestWaitForRoom(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	assert.Assert(t, !waitForRoom(ctx, newQueue([]*group{weighing("native", 1)}, 3, false, 8, 112)))
}
