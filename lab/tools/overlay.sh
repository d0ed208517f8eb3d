#!/bin/sh
# Writes what a program of others is built from into a directory, as a file for go build
# -overlay: its own sources, without what the lab never uses and what takes longest to build.
#
#   overlay.sh flanneld|liqoctl DIR    writes DIR/PROGRAM.json
set -eu
program=$1 dir=$2
cd "$(dirname "$0")"
here=$(${GO:-go} list -m)

source_of() { # MODULE
	${GO:-go} mod download "$1"
	${GO:-go} list -m -f '{{.Dir}}' "$1"
}

rm -rf "$dir/$program"
mkdir -p "$dir/$program"
case $program in
flanneld)
	# The backend udp needs cgo, and the module proxy refuses a part of tencentvpc.
	module=$(source_of github.com/flannel-io/flannel)
	sed -E '/backend\/(udp|tencentvpc)"/d' "$module/main.go" >"$dir/$program/main.go"
	;;
liqoctl)
	# Half of it is what install knows of three clouds. The others of these commands concern
	# what Isthmus does not have, and a benchmark.
	module=$(source_of github.com/liqotech/liqo)
	mkdir "$dir/$program/cmd"
	sed "s,github.com/liqotech/liqo/cmd/liqoctl/cmd,$here/liqoctl/cmd," "$module/cmd/liqoctl/main.go" >"$dir/$program/main.go"
	for file in "$module"/cmd/liqoctl/cmd/*.go; do
		case ${file##*/} in
		install.go | move.go | test.go | *_test.go) ;;
		*) sed -E '/new(Install|Move|Test)Command\(/d' "$file" >"$dir/$program/cmd/${file##*/}" ;;
		esac
	done
	;;
*)
	echo "overlay.sh: there is no program \"$program\": flanneld or liqoctl" >&2
	exit 1
	;;
esac
(cd "$dir" && find "$program" -name '*.go' | sort) |
	awk -v here="$PWD" -v dir="$dir" '{ printf "%s\"%s/%s\": \"%s/%s\"", NR == 1 ? "{\"Replace\": {\n" : ",\n", here, $0, dir, $0 } END { print "\n}}" }' >"$dir/$program.json"
