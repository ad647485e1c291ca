#!/usr/bin/env bash
# The last step of the images: user, commands, folders. Runs as root during the build.

set -euo pipefail

# Ubuntu's images come with a user of that number.
old=$(getent passwd 1000 | cut -d : -f 1 || true)
[[ -z $old ]] || userdel --remove "$old" 2>/dev/null
useradd --uid 1000 --create-home --shell /bin/bash horovod
install -d -o horovod -g horovod -m 700 /home/horovod/.ssh
install -d -o horovod -g horovod -m 755 /workspace /run/gradcomp

install -m 644 /opt/gradcomp/image/ssh_config /etc/ssh/ssh_config
install -m 644 /opt/gradcomp/image/sshd_config /etc/ssh/sshd_config
for command in entrypoint healthcheck test_image; do
    chmod 755 "/opt/gradcomp/bin/$command.sh"
    ln -s "/opt/gradcomp/bin/$command.sh" "/usr/local/bin/$command"
done
rm -rf /opt/gradcomp/image
