#!/bin/bash
# Runs the steps of an image in an empty root file system: image_root.sh ROOT SOURCE PYTHON STEP USER COMMAND...
# The machine's /usr stands in for the base image, a fresh environment in /usr/local for its Python.
set -euo pipefail
root=$1 source=$2 python=$3 step=$4 user=$5
shift 5

mount --make-rprivate /
mount -t tmpfs none "$root"
mkdir -p "$root"/{etc,tmp,proc,dev,src,usr}
for link in bin sbin lib lib64; do
    if [ -L "/$link" ]; then cp -P "/$link" "$root/$link"; fi
done
mount --bind /usr "$root/usr"
mount -o remount,bind,ro "$root/usr"
mount -t tmpfs none "$root/usr/local"
mount -t proc none "$root/proc"
mount --bind "$source" "$root/src"
touch "$root/dev/null" "$root/dev/urandom"
mount --bind /dev/null "$root/dev/null"
mount --bind /dev/urandom "$root/dev/urandom"
chmod 1777 "$root/tmp"
for file in ld.so.cache ld.so.conf nsswitch.conf resolv.conf hosts ssl pip.conf login.defs alternatives; do
    if [ -e "/etc/$file" ]; then cp -rL "/etc/$file" "$root/etc/$file"; fi
done
echo "root:x:0:0:root:/root:/bin/sh" > "$root/etc/passwd"
echo "root:x:0:" > "$root/etc/group"
base=$("$python" -c 'import sys; print(sys.base_prefix)')
case $base in
    /usr | /usr/*) [ "$base" != /usr/local ] || { echo "Python in /usr/local cannot be shown in the root" >&2; exit 3; } ;;
    *) mkdir -p "$root$base" && mount --bind "$base" "$root$base" && mount -o remount,bind,ro "$root$base" ;;
esac

inside() { chroot "$root" /usr/bin/env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp "$@"; }
inside "$base/bin/python3" -m venv /usr/local
inside /bin/sh -ec "$step"

umount "$root/src"
rm -rf "$root/tmp"/*
mount -t tmpfs none "$root/tmp"
chmod 1777 "$root/tmp"
mount -o remount,ro "$root/usr/local"
mount -o remount,ro "$root"
exec chroot --userspec="$user:$user" "$root" /usr/bin/env -i PATH=/usr/local/bin:/usr/bin:/bin "$@"
