{{- define "isthmus.image" -}}
{{ .Values.image.name }}:{{ .Values.image.version | default .Chart.AppVersion }}
{{- end }}

{{/* Labels of everything that this chart installs. What the controller makes
carries the value isthmus in managed-by, and nothing else may: it would be
pruned. */}}
{{- define "isthmus.labels" -}}
app.kubernetes.io/part-of: isthmus
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Where a pod may run: call with the values of a pod. One that is to leave a lost
node sooner than after the five minutes of Kubernetes says so (unreachableSeconds),
unless what it tolerates is about that already. */}}
{{- define "isthmus.placement" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- $tolerations := .tolerations | default list }}
{{- if hasKey . "unreachableSeconds" }}
{{- range $key := list "node.kubernetes.io/not-ready" "node.kubernetes.io/unreachable" }}
{{- $said := false }}
{{- range $.tolerations }}
{{- if and (has (.key | default $key) (list $key)) (eq (.effect | default "NoExecute") "NoExecute") }}
{{- $said = true }}
{{- end }}
{{- end }}
{{- if not $said }}
{{- $tolerations = append $tolerations (dict "key" $key "operator" "Exists" "effect" "NoExecute" "tolerationSeconds" (int $.unreachableSeconds)) }}
{{- end }}
{{- end }}
{{- end }}
{{- with $tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
nodeSelector:
  {{- merge (dict) (.nodeSelector | default dict) (dict "kubernetes.io/os" "linux") | toYaml | nindent 2 }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The networks of the pods, as JSON: what is given, or what the cluster says
of itself. Where it says it depends on who set it up. */}}
{{- define "isthmus.podCIDRs" -}}
{{- $found := .Values.ipam.podCIDRs }}
{{- with .Values.ipam.podCIDR }}
{{- if not (has . $found) }}
{{- $found = append $found . }}
{{- end }}
{{- end }}
{{- if not $found }}
{{- $found = include "isthmus.kubeadm" "podSubnet" | splitList "," | compact }}
{{- end }}
{{- if not $found }}
{{- $found = include "isthmus.staticPodFlag" (dict "pod" "kube-controller-manager" "flag" "--cluster-cidr") | splitList "," | compact }}
{{- end }}
{{- /* Its manifest had no namespace of its own once. */}}
{{- range list "kube-flannel" "kube-system" }}
{{- if not $found }}
{{- with lookup "v1" "ConfigMap" . "kube-flannel-cfg" }}
{{- with index .data "net-conf.json" | default "" | fromJson }}
{{- $found = list .Network (ternary .IPv6Network "" (default false .EnableIPv6)) | compact }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- if not $found }}
{{- with lookup "v1" "ConfigMap" "kube-system" "cilium-config" }}
{{- $found = index .data "cluster-pool-ipv4-cidr" | default "" | splitList " " | compact }}
{{- end }}
{{- end }}
{{- if not $found }}
{{- fail "ipam.podCIDRs: the networks of the pods are not given, and were not found in kubeadm's configuration, the flags of kube-controller-manager, or the configuration of flannel or Cilium: set ipam.podCIDRs, for example ipam.podCIDRs={10.244.0.0/16}" }}
{{- end }}
{{- toJson $found }}
{{- end }}

{{/* The network of the Services: what is given, or what the cluster says. */}}
{{- define "isthmus.serviceCIDR" -}}
{{- $found := .Values.ipam.serviceCIDR }}
{{- if and (not $found) (.Capabilities.APIVersions.Has "networking.k8s.io/v1/ServiceCIDR") }}
{{- with lookup "networking.k8s.io/v1" "ServiceCIDR" "" "kubernetes" }}
{{- $found = first .spec.cidrs }}
{{- end }}
{{- end }}
{{- if not $found }}
{{- $found = include "isthmus.kubeadm" "serviceSubnet" | splitList "," | first }}
{{- end }}
{{- if not $found }}
{{- $found = include "isthmus.staticPodFlag" (dict "pod" "kube-apiserver" "flag" "--service-cluster-ip-range") | splitList "," | first }}
{{- end }}
{{- if not $found }}
{{- fail "ipam.serviceCIDR: the network of the Services is not given, and was not found as a ServiceCIDR, in kubeadm's configuration, or in the flags of kube-apiserver: set ipam.serviceCIDR, for example ipam.serviceCIDR=10.96.0.0/12" }}
{{- end }}
{{- $found }}
{{- end }}

{{/* A field of networking in kubeadm's configuration. */}}
{{- define "isthmus.kubeadm" -}}
{{- $field := . }}
{{- with lookup "v1" "ConfigMap" "kube-system" "kubeadm-config" }}
{{- with index .data "ClusterConfiguration" }}
{{- with (fromYaml .).networking }}
{{- index . $field | default "" }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The value of a flag of a component of the control plane that runs as a pod. */}}
{{- define "isthmus.staticPodFlag" -}}
{{- $value := "" }}
{{- range (lookup "v1" "Pod" "kube-system" "").items }}
{{- if and .metadata.labels (eq (index .metadata.labels "component" | default "") $.pod) }}
{{- range .spec.containers }}
{{- range concat (.command | default list) (.args | default list) }}
{{- if hasPrefix (printf "%s=" $.flag) . }}
{{- $value = trimPrefix (printf "%s=" $.flag) . }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- $value }}
{{- end }}

{{/* Values of the public system that are set and mean nothing here, as JSON:
what they switch is always so, or is no part of Isthmus. */}}
{{- define "isthmus.withoutEffect" -}}
{{- $out := list }}
{{- range $path := list
  "networking.reflectIPs" "networking.apiServerAccessThroughEndpointSlices" "networking.serverResources" "networking.clientResources"
  "networking.gateway.gatewayTemplateWatchEnabled" "networking.gatewayTemplates.wireguard.preserveClientEndpoint"
  "networking.gatewayTemplates.container.gateway.image" "networking.gatewayTemplates.container.wireguard" "networking.gatewayTemplates.container.geneve"
  "networking.gatewayTemplates.nftablesMonitor" "networking.gatewayTemplates.routeMonitor"
  "networking.fabric.image" "networking.fabric.config.fullMasquerade" "networking.fabric.config.gatewayMasqueradeBypass"
  "networking.fabric.config.nftablesMonitor" "networking.fabric.config.routeMonitor"
  "ipam.internal" "ipam.external" }}
{{- $node := $.Values }}
{{- range splitList "." $path }}
{{- if kindIs "map" $node }}
{{- $node = index $node . }}
{{- end }}
{{- end }}
{{- if not (kindIs "invalid" $node) }}
{{- $out = append $out $path }}
{{- end }}
{{- end }}
{{- toJson $out }}
{{- end }}

{{/* The peers that reach each other through this cluster: all, or pairs. */}}
{{- define "isthmus.directConnections" -}}
{{- $deny := .Values.networking.denyDirectConnections | toString }}
{{- $pairs := list }}
{{- range .Values.networking.directConnections }}
{{- $pairs = append $pairs (join ":" .) }}
{{- end }}
{{- if and $pairs (ne $deny "") }}
{{- fail (printf "networking.directConnections: names pairs of peers, and networking.denyDirectConnections: %s is about all of them: leave one of them empty" $deny) }}
{{- end }}
{{- ternary "all" (join "," $pairs) (eq $deny "false") }}
{{- end }}

{{/* A CIDR as part of a name. */}}
{{- define "isthmus.dashed" -}}
{{ . | replace "." "-" | replace ":" "-" | replace "/" "-" }}
{{- end }}

{{/* The probes of all three daemons. A busy machine may take two minutes to
start one before liveness has a say: one that is killed for that starts again
and is slower still. */}}
{{- define "isthmus.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: health}
  periodSeconds: 1
  timeoutSeconds: 2
  failureThreshold: 120
livenessProbe:
  httpGet: {path: /healthz, port: health}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: health}
  periodSeconds: 1
  timeoutSeconds: 2
{{- end }}

{{/* Nothing but what it needs: netlink, and no way to get more. Root, because
Kubernetes gives capabilities to nobody else. */}}
{{- define "isthmus.netAdmin" -}}
securityContext:
  runAsUser: 0
  privileged: false
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
    add: [NET_ADMIN]
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Who and where a pod is. */}}
{{- define "isthmus.whereabouts" -}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}
