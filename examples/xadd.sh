#!/bin/sh
# A service that needs nothing but redis-cli: it adds paid orders to a stream, and `pipeline ingest` publishes them.
#
#   examples/xadd.sh 4711 a@example.org
#
# The data names the fact like every other way to publish, order:4711, so `--message-id-field id` makes a repeat
# harmless, whichever way it comes. XADD itself is not idempotent. After a failure it is unknown whether the entry is
# there: run it again.
set -eu

order=${1:?which order}
email=${2:?whose email}
case "$order$email" in
*[\"\\]* | *[[:cntrl:]]*)
    echo "quotes, backslashes and control characters would have to be escaped; use a program that writes JSON" >&2
    exit 2
    ;;
esac

url=${REDIS_URL:-redis://localhost:6379/0}
case "$url" in
redis://:* | rediss://:*) url="${url%%:*}://default:${url#*://:}" ;; # redis-cli 7.0 takes an empty user for a name
esac

exec "${REDIS_CLI:-redis-cli}" -u "$url" \
    XADD "${STREAM:-orders}" '*' data "{\"id\": \"order:$order\", \"order\": \"$order\", \"email\": \"$email\"}"
