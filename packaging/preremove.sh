#!/bin/sh
# Before the package is removed. dpkg says "remove", rpm 0; at an upgrade they say other
# words, and the program that comes next looks after the box.
case "${1:-}" in
    remove | 0)
        if [ -e /var/lib/llmbox ]; then
            echo "llmbox: a box is on this machine, and it goes on serving without this program." >&2
            echo "  to take it away: install the package again, then: sudo llmbox uninstall" >&2
        fi
        ;;
esac
exit 0
