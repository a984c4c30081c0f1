{{- define "pellucid.name" -}}
{{- if contains "pellucid" .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-pellucid" (.Release.Name | trunc 40 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "pellucid.selector" -}}
app.kubernetes.io/name: pellucid
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "pellucid.metadata" -}}
name: {{ include "pellucid.name" . }}
labels:
  {{- include "pellucid.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- /* The config file: a line for each setting. JSON's strings, numbers and lists are also TOML's. */ -}}
{{- define "pellucid.config" -}}
{{- $own := dict "host" "0.0.0.0" "port" 8000 "drain-timeout" (.Values.drainTimeout | int) -}}
{{- if .Values.keysSecret -}}
{{- $_ := set $own "keys-file" "/keys/keys.toml" -}}
{{- else -}}
{{- $_ := set $own "allow-unauthenticated-network" true -}}
{{- end -}}
{{- if .Values.tlsSecret -}}
{{- $_ := set $own "tls-cert" "/tls/tls.crt" -}}
{{- $_ := set $own "tls-key" "/tls/tls.key" -}}
{{- end -}}
{{- $lines := list -}}
{{- range $name, $value := merge $own .Values.settings -}}
{{- $lines = append $lines (printf "%s = %s" $name (toJson $value)) -}}
{{- end -}}
{{- join "\n" $lines -}}
{{- end -}}

{{- define "pellucid.probe" -}}
path: {{ .path }}
port: http
{{- if .root.Values.tlsSecret }}
scheme: HTTPS
{{- end }}
{{- end -}}
