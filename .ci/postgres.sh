#!/usr/bin/env bash
# A throw-away PostgreSQL: .ci/postgres.sh start DIR prints its URL, .ci/postgres.sh stop DIR ends and deletes it.
#
# It listens on a Unix socket in DIR alone, so it needs no free port and no password. initdb refuses to run as
# root, who therefore hands DIR to the user that Debian's package makes. Root may also install what is missing.
set -euo pipefail

command=$1
dir=$2

bin() { ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -V | tail -n 1; }

owner() {
    if [ "$(id -u)" = 0 ]; then runuser -u postgres -- "$@"; else "$@"; fi
}

install_postgres() {
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "error: no PostgreSQL in /usr/lib/postgresql; install it, or run as root on Debian" >&2
        return 1
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends postgresql
}

case $command in
start)
    if [ -z "$(bin)" ]; then install_postgres >&2; fi
    mkdir -p "$dir"
    if [ "$(id -u)" = 0 ]; then chown postgres "$dir"; fi
    cd "$dir" # PostgreSQL's programs complain about a directory they cannot enter
    owner "$(bin)/initdb" --pgdata="$dir/data" --username=postgres --auth=trust \
        --encoding=UTF8 --locale=C.UTF-8 --no-sync >"$dir.log" 2>&1 || { cat "$dir.log" >&2; exit 1; }
    # No client but the tests: what a crash of the machine would lose does not matter.
    owner "$(bin)/pg_ctl" start --pgdata="$dir/data" --wait --log="$dir/log" --options="\
        -c listen_addresses='' -c unix_socket_directories='$dir' -c max_connections=200 \
        -c fsync=off -c synchronous_commit=off -c full_page_writes=off" >"$dir.log" 2>&1 ||
        { cat "$dir.log" "$dir/log" >&2; exit 1; }
    echo "postgresql+asyncpg://postgres@/postgres?host=$dir"
    ;;
stop)
    if [ -d "$dir/data" ]; then
        cd "$dir"
        owner "$(bin)/pg_ctl" stop --pgdata="$dir/data" --mode=immediate --wait >/dev/null
    fi
    cd /
    rm -rf "$dir" "$dir.log"
    ;;
*)
    echo "usage: .ci/postgres.sh start|stop DIR" >&2
    exit 2
    ;;
esac
