#!/bin/sh
# Writes what the public system's daemons are built from into a directory, as a file for go
# build -overlay: the main.go of each, as a package that one program can have beside the
# others. It writes the chart that deploys them as well.
#
#   overlay.sh DIR CHART    writes DIR/public.json, and the chart's directory CHART
set -eu
dir=$1 chart=$2
cd "$(dirname "$0")"
${GO:-go} mod download github.com/liqotech/liqo
module=$(${GO:-go} list -m -f '{{.Dir}}' github.com/liqotech/liqo)

rm -rf "$dir/public"
mkdir -p "$dir"
# _liqo imports what is in the overlay only: without the underscore go mod tidy would look for that.
printf '{"Replace": {\n"%s/liqo/main.go": "%s/_liqo/main.go"' "$PWD" "$PWD" >"$dir/public.json"
for daemon in fabric:fabric gateway:gateway gateway/geneve:geneve gateway/wireguard:wireguard ipam:ipam liqo-controller-manager:manager webhook:webhook; do
	package=${daemon#*:}
	mkdir -p "$dir/public/$package"
	sed -E "s/^package main\$/package $package/; s/^func main\(\)/func Main()/" "$module/cmd/${daemon%:*}/main.go" >"$dir/public/$package/main.go"
	printf ',\n"%s/%s/main.go": "%s/public/%s/main.go"' "$PWD" "$package" "$dir" "$package" >>"$dir/public.json"
done
echo '}}' >>"$dir/public.json"

rm -rf "$chart"
cp -r "$module/deployments/liqo" "$chart"
chmod -R u+w "$chart"
# Images of the lab, whatever release they are of.
echo 'appVersion: dev' >>"$chart/Chart.yaml"
