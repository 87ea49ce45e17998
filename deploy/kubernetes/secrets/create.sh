#!/usr/bin/env bash
# Makes every secret that the manifests need, one for each role and each namespace with models, and applies them. What exists stays as
# it is: run it again after an upgrade, and for another namespace or model.
#
#     deploy/kubernetes/secrets/create.sh OWNER NATS_CA POSTGRES_CA NAMESPACE=MODEL,... [NAMESPACE=MODEL,...]
#
# OWNER        file with postgresql://OWNER:PASSWORD@HOST/DATABASE, a user who owns the database and may create roles
# NATS_CA      certificates (PEM) of the authority that signed the certificate of NATS
# POSTGRES_CA  the same of Postgres
# NAMESPACE=MODEL,...  a namespace with sidecars, and the models on which they may report. It is remembered: a later run needs
#              only what is new. `quantdrift` is the namespace of the intake, which may report on all of these models if it is left out.
set -euo pipefail
usage() {
  sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
  exit 2
}
[ $# -ge 3 ] || usage
owner=$(cat "$1")
authorities=$(cat "$2" "$3")
cd "$(dirname "$0")"
umask 077
mkdir -p postgres shadow namespaces
printf '%s\n' "$authorities" > ca.crt

for given in "${@:4}"; do
  [[ $given =~ ^([a-z0-9]([-a-z0-9]*[a-z0-9])?)=([^[:space:]]+)$ ]] || usage
  mkdir -p "namespaces/${BASH_REMATCH[1]}"
  printf '%s\n' "${BASH_REMATCH[3]}" > "namespaces/${BASH_REMATCH[1]}/models"
done
mkdir -p namespaces/quantdrift
sidecars=() all=() namespaces=()
for file in namespaces/*/models; do
  [ -e "$file" ] || usage
  namespace=$(basename "$(dirname "$file")")
  [ "$namespace" = quantdrift ] && continue
  namespaces+=("$namespace")
  all+=("$(cat "$file")")
  sidecars+=(--sidecar "$namespace=$(cat "$file")")
done
[ ${#namespaces[@]} -gt 0 ] || usage
if [ -e namespaces/quantdrift/models ]; then
  sidecars+=(--sidecar "quantdrift=$(cat namespaces/quantdrift/models)")
else
  sidecars+=(--sidecar "quantdrift=$(IFS=,; printf '%s' "${all[*]}")")
fi

random() { test -s "$1" || openssl rand -hex 32 | tr -d '\n' > "$1"; }
key() { test -s "$1" || quantdrift keys new "$1" > /dev/null; }
caller() { printf '%s sha256:%s %s\n' "$1" "$(openssl dgst -sha256 -r "$2" | cut -d ' ' -f 1)" "$(tr ',' ' ' < "$3")"; }

quantdrift setup nats --config ../config/config.toml --keys nats "${sidecars[@]}" > nats-users.conf
key shadow/payload-keys.json
for namespace in quantdrift "${namespaces[@]}"; do
  folder=namespaces/$namespace
  cp "nats/sidecar-$namespace.nk" "$folder/sidecar.nk"
  random "$folder/sampling-salt"
  key "$folder/hmac-key"
  # Keys that an earlier release made for a namespace: the shadow goes on opening what they have encrypted.
  if [ -s "$folder/payload-keys.json" ] && ! grep -q '"public"' "$folder/payload-keys.json"; then
    quantdrift keys join shadow/payload-keys.json "$folder/payload-keys.json" > /dev/null
  fi
  # Sidecars encrypt for the shadow, and open nothing.
  quantdrift keys public shadow/payload-keys.json "$folder/payload-keys.json" > /dev/null
done
# The programs of each namespace have tokens of their own, for its models: at the intake, and for verdicts of gates.
: > namespaces/quantdrift/intake-tokens
: > namespaces/quantdrift/gate-tokens
for namespace in "${namespaces[@]}"; do
  folder=namespaces/$namespace
  for name in intake gate; do
    random "$folder/$name-token"
    caller "$namespace" "$folder/$name-token" "$folder/models" >> "namespaces/quantdrift/$name-tokens"
  done
  cp ca.crt "$folder/ca.crt"
  cp sidecar/kustomization.yaml "$folder/kustomization.yaml"
done

# From here the authorities are in this folder; in the pods they are beside the role's secrets.
printf '%s?sslmode=verify-full&sslrootcert=%s/ca.crt\n' "${owner%%\?*}" "$PWD" > postgres/migrate.dsn
export QUANTDRIFT__STORAGE__DSN_FILE=$PWD/postgres/migrate.dsn
quantdrift db upgrade --config ../config/config.toml
quantdrift setup postgres --config ../config/config.toml --apply --users postgres
sed -i "s#sslrootcert=[^&]*#sslrootcert=/etc/quantdrift/secrets/ca.crt#" postgres/*.dsn

for namespace in quantdrift "${namespaces[@]}"; do
  kubectl get namespace "$namespace" > /dev/null 2>&1 || kubectl create namespace "$namespace"
done
kubectl apply --kustomize .
for namespace in "${namespaces[@]}"; do
  kubectl apply --namespace "$namespace" --kustomize "namespaces/$namespace"
done
echo "put $PWD/nats-users.conf into the configuration of your NATS server, and reload it" >&2
