#!/bin/sh
# Runs the commands of the README that begin with bin/lab, in its section Install, the four of
# its section Peer, and those of docs/peering.md that begin with bin/lab, as they are written:
# two clusters of real nodes are installed, connected, tested by their kubeconfigs, connected by
# an invitation and emptied again, and two others connect by an invitation.
set -eu

section() { # NAME: the commands of a section of the README
	awk -v name="$1" '/^## / { here = $2 == name } /^```/ { code = !code; next } here && code && /^(make nodes && )?(bin\/lab|isthmusctl) /' README.md
}

run() { # COMMANDS, one a line [PROGRAM…]: with which each is run, else sh -c
	commands=$1
	shift
	[ $# -gt 0 ] || set -- sh -c
	[ "$commands" ] || { echo "lab/readme.sh: the README has none of the commands that come next" >&2; exit 1; }
	printf '%s\n' "$commands" | while IFS= read -r command; do
		printf '\n$ %s\n' "$command"
		"$@" "$command" </dev/null
	done
}

between() { # COMMANDS, one a line: where the contexts milan and rome are those of the lab
	run "$1" bin/lab exec milan/control-plane -- sh -c 'cd "$TMPDIR" && export KUBECONFIG="$KUBECONFIGS/milan/admin.kubeconfig:$KUBECONFIGS/rome/admin.kubeconfig" && eval "$1"' sh
}

if bin/lab ls 2>/dev/null | grep -q '^bare-clusters-\|^hub-joins-'; then
	echo "lab/readme.sh: a lab of bare-clusters or hub-joins is up, and this would take it down: bin/lab ls, bin/lab down NAME" >&2
	exit 1
fi
install=$(section Install | grep 'bin/lab ')
four=$(section Peer)
peer=$(awk '/^```/ { code = !code; next } code && /^bin\/lab /' docs/peering.md)
trap 'for lab in bare-clusters hub-joins; do bin/lab down $lab >/dev/null 2>&1 || true; done' EXIT
run "$(printf '%s\n' "$install" | sed '/ uninstall/,$d')"
# Connected, by a second command that finds nothing to do as well, looked at, the rows that run
# in anybody's clusters, disconnected.
between "$(printf '%s\n' "$four" | grep 'network connect')"
run "$(printf '%s\n' "$peer" | grep 'network connect\|lab kubectl')"
run "$(section The | grep 'isthmus-lab/probe$\| exec .* --world kubeconfig')"
run "$(printf '%s\n' "$peer" | grep 'network reset')"
between "$(printf '%s\n' "$four" | grep 'isthmusctl peer')"
between 'isthmusctl peer remove rome --context milan --wait
isthmusctl peer remove milan --context rome --wait'
run "$(printf '%s\n' "$install" | sed -n '/ uninstall/,$p')"
run 'bin/lab up hub-joins'
run "$(printf '%s\n' "$peer" | grep 'isthmusctl peer')"
run 'bin/lab down hub-joins'
