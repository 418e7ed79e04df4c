#!/usr/bin/env bash
# Refuse a commit whose subject is longer than 72 characters or ends with a full stop: .ci/commit_subject.sh MESSAGE_FILE
set -euo pipefail
subject=$(grep -v '^#' "$1" | head -n 1)
if [ "${#subject}" -gt 72 ]; then
    echo "error: the subject has ${#subject} characters, 72 are allowed: $subject" >&2
    exit 1
fi
case $subject in
*.) echo "error: the subject ends with a full stop: $subject" >&2 && exit 1 ;;
esac
