{{- define "kvrouter.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvrouter.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "kvrouter.selector" -}}
app.kubernetes.io/name: kvrouter
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .service }}
{{- end -}}

{{- define "kvrouter.labels" -}}
{{ include "kvrouter.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{- define "kvrouter.nats" -}}
{{- if .Values.nats.bundled -}}
nats://{{ include "kvrouter.name" . }}-nats:4222
{{- else -}}
{{ required "nats.url is required unless nats.bundled is true: the URLs of your NATS with JetStream" .Values.nats.url }}
{{- end -}}
{{- end -}}

{{- define "kvrouter.etcd" -}}
{{- if .Values.etcd.bundled -}}
{{ include "kvrouter.name" . }}-etcd:2379
{{- else -}}
{{ required "etcd.endpoints is required unless etcd.bundled is true: the endpoints of your etcd, host:port" .Values.etcd.endpoints }}
{{- end -}}
{{- end -}}

{{- define "kvrouter.scheme" -}}
{{ if .Values.tls.enabled }}https{{ else }}http{{ end }}
{{- end -}}

{{/* What every process of kvrouter gets: addresses, and the pod's own for others to reach it. */}}
{{- define "kvrouter.env" -}}
- name: KVROUTER_ETCD
  value: {{ include "kvrouter.etcd" . | quote }}
- name: KVROUTER_NATS
  value: {{ include "kvrouter.nats" . | quote }}
- name: KVROUTER_ADVERTISE
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: KVROUTER_DRAIN_SECONDS
  value: {{ .Values.drainSeconds | quote }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Mounts of a process. Arguments: root, service. */}}
{{- define "kvrouter.mounts" -}}
- {name: config, mountPath: /etc/kvrouter/kvrouter.toml, subPath: kvrouter.toml, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if .root.Values.tls.enabled }}
- {name: tls, mountPath: /etc/kvrouter/tls, readOnly: true}
{{- end }}
{{- if and .root.Values.apiKeys.secret (eq .service "frontend") }}
- {name: api-keys, mountPath: /etc/kvrouter/keys, readOnly: true}
{{- end }}
{{- range $index, $file := .root.Values.secretFiles }}
- {name: secret-{{ $index }}, mountPath: {{ $file.path }}, readOnly: true}
{{- end }}
{{- end -}}

{{/* Volumes of those mounts. Arguments: root, service. */}}
{{- define "kvrouter.volumes" -}}
- name: config
  configMap: {name: {{ include "kvrouter.name" .root }}-config}
- name: tmp
  emptyDir: {}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret: {secretName: {{ get .root.Values.tls.secrets .service }}, defaultMode: 0440}
{{- end }}
{{- if and .root.Values.apiKeys.secret (eq .service "frontend") }}
- name: api-keys
  secret: {secretName: {{ .root.Values.apiKeys.secret }}, defaultMode: 0440}
{{- end }}
{{- range $index, $file := .root.Values.secretFiles }}
- name: secret-{{ $index }}
  secret: {secretName: {{ $file.secret }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{- define "kvrouter.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "kvrouter.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "kvrouter.spread" -}}
{{- with .root.Values.topologySpread.key }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "kvrouter.selector" $ | nindent 8 }}
    matchLabelKeys: [pod-template-hash]
{{- end }}
{{- end -}}

{{- define "kvrouter.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/*
A Deployment of one service. Arguments: root, service, values, ports (list of {name, port}). A service that must run only once
and reads the Kubernetes API also has: reader (the name of its service account), command, and env.
*/}}
{{- define "kvrouter.deployment" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "kvrouter.name" .root }}-{{ .service }}
  labels: {{- include "kvrouter.labels" . | nindent 4 }}
spec:
  {{- if not (and .values.autoscaling .values.autoscaling.enabled) }}
  replicas: {{ .values.replicas | default 1 }}
  {{- end }}
  {{- if .reader }}
  strategy: {type: Recreate}
  {{- else }}
  # A new pod is ready, with its state restored, before an old one stops.
  strategy:
    type: RollingUpdate
    rollingUpdate: {maxSurge: 1, maxUnavailable: 0}
  {{- end }}
  minReadySeconds: 5
  selector:
    matchLabels: {{- include "kvrouter.selector" . | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "kvrouter.labels" . | nindent 8 }}
        {{- with .root.Values.podLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      annotations:
        checksum/config: {{ include (print .root.Template.BasePath "/config.yaml") .root | sha256sum }}
        {{- with .root.Values.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    spec:
      serviceAccountName: {{ .reader | default (include "kvrouter.name" .root) }}
      automountServiceAccountToken: {{ not (empty .reader) }}
      enableServiceLinks: false
      terminationGracePeriodSeconds: {{ add .root.Values.drainSeconds 15 }}
      {{- with .root.Values.imagePullSecrets }}
      imagePullSecrets: {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext: {{- include "kvrouter.podSecurity" . | nindent 8 }}
      {{- include "kvrouter.spread" . | nindent 6 }}
      {{- include "kvrouter.placement" .values | nindent 6 }}
      containers:
        - name: {{ .service }}
          image: {{ include "kvrouter.image" .root | quote }}
          imagePullPolicy: {{ .root.Values.image.pullPolicy }}
          command: [{{ .command | default (print "kvrouter-" .service) }}, --config, /etc/kvrouter/kvrouter.toml]
          env:
            {{- include "kvrouter.env" .root | nindent 12 }}
            {{- with .env }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          ports:
            {{- range .ports }}
            - {name: {{ .name }}, containerPort: {{ .port }}}
            {{- end }}
          # Restoring the index may take minutes; until then the pod is alive and not ready.
          livenessProbe:
            httpGet: {path: /health, port: metrics, scheme: {{ include "kvrouter.scheme" .root | upper }}}
            initialDelaySeconds: 10
            periodSeconds: 10
            failureThreshold: 6
          readinessProbe:
            httpGet: {path: /ready, port: metrics, scheme: {{ include "kvrouter.scheme" .root | upper }}}
            periodSeconds: 2
            failureThreshold: 2
          lifecycle:
            # Endpoints learn that the pod stops before it refuses calls.
            preStop: {exec: {command: [sleep, "5"]}}
          resources: {{- toYaml .values.resources | nindent 12 }}
          securityContext: {{- include "kvrouter.containerSecurity" . | nindent 12 }}
          volumeMounts: {{- include "kvrouter.mounts" . | nindent 12 }}
      volumes: {{- include "kvrouter.volumes" . | nindent 8 }}
{{- end -}}

{{- define "kvrouter.disruptionBudget" -}}
{{- if .root.Values.podDisruptionBudgets }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "kvrouter.name" .root }}-{{ .service }}
  labels: {{- include "kvrouter.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {{- include "kvrouter.selector" . | nindent 6 }}
{{- end }}
{{- end -}}
