#!/bin/sh
# A service that needs nothing but redis-cli: it adds paid orders to a stream, and `pipeline ingest` publishes them.
#
#   examples/xadd.sh 4711 a@example.org
#
# The order's number is in the data, so `--message-id-field order` makes a repeat harmless: XADD itself is not
# idempotent, and when it fails nobody knows whether the entry is there. Just run it again.
set -eu

order=${1:?which order}
email=${2:?whose email}
case "$order$email" in
*[\"\\]*)
    echo "quotes and backslashes would have to be escaped; use a program that writes JSON" >&2
    exit 2
    ;;
esac

exec "${REDIS_CLI:-redis-cli}" -u "${REDIS_URL:-redis://localhost:6379/0}" \
    XADD "${STREAM:-orders}" '*' data "{\"order\": \"$order\", \"email\": \"$email\"}"
