#!/bin/sh
# Creates the users of kvrouter in etcd, with rights on their own keys, and turns authentication on.
# Run it once: ETCDCTL_ENDPOINTS=https://HOST:2379 ETCDCTL_CACERT=ca.crt \
#   ETCDCTL_CERT=admin.crt ETCDCTL_KEY=admin.key sh etcd-accounts.sh
set -eu
cd "$(dirname "$0")"
ctl=${ETCDCTL:-etcdctl}
"$ctl" user add root --interactive=false < root.etcd-password
"$ctl" user grant-role root root
"$ctl" role add frontend
"$ctl" role grant-permission --prefix=true frontend read /kvrouter/v1/kvrouter/
"$ctl" role grant-permission --prefix=true frontend readwrite /kvrouter/v1/kvrouter/services/frontend/
"$ctl" user add frontend --interactive=false < frontend.etcd-password
"$ctl" user grant-role frontend frontend
"$ctl" role add scheduler
"$ctl" role grant-permission --prefix=true scheduler read /kvrouter/v1/kvrouter/
"$ctl" role grant-permission --prefix=true scheduler readwrite /kvrouter/v1/kvrouter/services/scheduler/
"$ctl" role grant-permission --prefix=true scheduler readwrite /kvrouter/v1/kvrouter/thresholds/
"$ctl" role grant-permission --prefix=true scheduler readwrite /kvrouter/v1/kvrouter/components/workers/drains/
"$ctl" role grant-permission scheduler readwrite /kvrouter/v1/kvrouter/components/workers/descriptor
"$ctl" user add scheduler --interactive=false < scheduler.etcd-password
"$ctl" user grant-role scheduler scheduler
"$ctl" role add indexer
"$ctl" role grant-permission --prefix=true indexer read /kvrouter/v1/kvrouter/
"$ctl" role grant-permission --prefix=true indexer readwrite /kvrouter/v1/kvrouter/services/indexer/
"$ctl" role grant-permission indexer readwrite /kvrouter/v1/kvrouter/components/workers/snapshot
"$ctl" role grant-permission indexer readwrite /kvrouter/v1/kvrouter/components/workers/snapshot-lock
"$ctl" role grant-permission --prefix=true indexer readwrite /kvrouter/v1/kvrouter/components/workers/applied/
"$ctl" user add indexer --interactive=false < indexer.etcd-password
"$ctl" user grant-role indexer indexer
"$ctl" role add admin
"$ctl" role grant-permission --prefix=true admin readwrite /kvrouter/v1/kvrouter/
"$ctl" user add admin --interactive=false < admin.etcd-password
"$ctl" user grant-role admin admin
"$ctl" role add worker-0000000000000001
"$ctl" role grant-permission worker-0000000000000001 read /kvrouter/v1/kvrouter/components/workers/descriptor
"$ctl" role grant-permission worker-0000000000000001 readwrite /kvrouter/v1/kvrouter/components/workers/workers/0000000000000001
"$ctl" role grant-permission worker-0000000000000001 readwrite /kvrouter/v1/kvrouter/components/workers/incarnations/0000000000000001
"$ctl" user add worker-0000000000000001 --interactive=false < worker-0000000000000001.etcd-password
"$ctl" user grant-role worker-0000000000000001 worker-0000000000000001
"$ctl" auth enable
