# What of this machine an installer can have changed, one line each, under headings.
# It is read twice and compared; nothing is written.
echo "## self $$"
places() {
	find / /usr/local /run /tmp /dev -xdev \( -path /lab -o -path /var/log/boot.log \) -prune -o "$@"
}
echo "## file"
places -type d -printf '%y %m %U:%G - %p\n' -o \( -path /lab -o -path /var/log/boot.log \) -prune -o -printf '%y %m %U:%G %s %p %l\n'
echo "## hash"
places -type f -print0 | xargs -0 -r sha256sum --
echo "## mount"
awk '{ sep = 0; for (i = 7; i <= NF; i++) if ($i == "-") sep = i; print $5, $4, $(sep + 1) }' /proc/self/mountinfo
echo "## link"
ip -o link show | sed 's/^[0-9]*: //; s/@if[0-9]*//; s/ qlen .*//; s/\\.*//'
echo "## address"
ip -o address show | sed 's/^[0-9]*: //; s/ valid_lft .*//'
echo "## route"
ip -4 route show table all
ip -6 route show table all
echo "## rule"
ip -4 rule show
ip -6 rule show
for form in iptables-nft ip6tables-nft iptables-legacy ip6tables-legacy; do
	command -v $form-save >/dev/null || continue
	echo "## filter $form"
	$form-save 2>/dev/null
done
if command -v nft >/dev/null; then
	echo "## nft"
	nft list ruleset
fi
if command -v ipset >/dev/null; then
	echo "## ipset"
	ipset list -name
fi
echo "## cgroup"
find /sys/fs/cgroup -mindepth 1 -type d
echo "## sysctl"
find /proc/sys/net /proc/sys/kernel /proc/sys/vm /proc/sys/fs/inotify -type f -perm -u+rw ! -path '*/neigh/*' ! -name stat_refresh -print0 |
	xargs -0 grep -Hs ''
echo "## process"
ps -e -o pid=,ppid=,stat=,args=
