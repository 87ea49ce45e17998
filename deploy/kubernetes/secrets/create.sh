#!/usr/bin/env bash
# Makes every secret that the manifests need, one for each role, and applies them. What exists stays as it is: run it again
# after an upgrade.
#
#     deploy/kubernetes/secrets/create.sh OWNER NATS_CA POSTGRES_CA
#
# OWNER        file with postgresql://OWNER:PASSWORD@HOST/DATABASE, a user who owns the database and may create roles
# NATS_CA      certificates (PEM) of the authority that signed the certificate of NATS
# POSTGRES_CA  the same of Postgres
set -euo pipefail
if [ $# -ne 3 ]; then
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
owner=$(cat "$1")
authorities=$(cat "$2" "$3")
cd "$(dirname "$0")"
umask 077
mkdir -p postgres random
printf '%s\n' "$authorities" > ca.crt

quantdrift setup nats --config ../config/config.toml --keys nats > nats-users.conf
for name in sampling-salt hmac-key intake-token gate-token; do
  test -s "random/$name" || openssl rand -hex 32 | tr -d '\n' > "random/$name"
done

# From here the authorities are in this folder; in the pods they are beside the role's secrets.
printf '%s?sslmode=verify-full&sslrootcert=%s/ca.crt\n' "${owner%%\?*}" "$PWD" > postgres/migrate.dsn
export QUANTDRIFT__STORAGE__DSN_FILE=$PWD/postgres/migrate.dsn
quantdrift db upgrade --config ../config/config.toml
quantdrift setup postgres --config ../config/config.toml --apply --users postgres
sed -i "s#sslrootcert=[^&]*#sslrootcert=/etc/quantdrift/secrets/ca.crt#" postgres/*.dsn

for namespace in quantdrift models; do
  kubectl get namespace "$namespace" > /dev/null 2>&1 || kubectl create namespace "$namespace"
done
kubectl apply --kustomize .
echo "put $PWD/nats-users.conf into the configuration of your NATS server, and reload it" >&2
