# Bakes a machine image with llmbox. Not run on a real cloud yet: docs/fidelity.md.
#   packer init . && packer build -var base_image=… -var base_checksum=sha256:… \
#     -var llmbox=bin/llmbox -var bundle=box.tar.zst .
packer {
  required_plugins {
    qemu = {
      source  = "github.com/hashicorp/qemu"
      version = ">= 1.1.0"
    }
  }
}

variable "base_image" {
  type        = string
  description = "URL or path of a qcow2 cloud image with systemd, cloud-init and NVIDIA's driver and container toolkit"
}

variable "base_checksum" {
  type        = string
  description = "its checksum, as sha256:…"
}

variable "llmbox" {
  type        = string
  description = "the llmbox binary for the image's architecture"
}

variable "bundle" {
  type        = string
  description = "file of llmbox bundle create"
}

variable "install_flags" {
  type        = string
  default     = ""
  description = "flags of llmbox install at the first boot, such as --port 8081"
}

variable "disk_size" {
  type        = string
  default     = "256G"
  description = "bundle, unpacked bundle and unpacked images lie on it at a time"
}

variable "ssh_username" {
  type    = string
  default = "debian"
}

variable "ssh_private_key_file" {
  type        = string
  description = "private key of a pair made for this build alone"
}

variable "ssh_public_key" {
  type        = string
  description = "its public half"
}

source "qemu" "llmbox" {
  iso_url              = var.base_image
  iso_checksum         = var.base_checksum
  disk_image           = true
  disk_size            = var.disk_size
  format               = "qcow2"
  accelerator          = "kvm"
  cpus                 = 4
  memory               = 8192
  headless             = true
  ssh_username         = var.ssh_username
  ssh_private_key_file = var.ssh_private_key_file
  ssh_timeout          = "15m"
  shutdown_command     = "sudo poweroff"
  cd_label             = "cidata"
  cd_content = {
    "meta-data" = ""
    "user-data" = "#cloud-config\nssh_authorized_keys:\n  - ${var.ssh_public_key}\n"
  }
}

build {
  sources = ["source.qemu.llmbox"]

  provisioner "file" {
    source      = var.llmbox
    destination = "/tmp/llmbox"
  }

  provisioner "file" {
    source      = var.bundle
    destination = "/var/tmp/box.tar.zst"
  }

  provisioner "shell" {
    inline = [
      "set -eu",
      "sudo install -m 0755 /tmp/llmbox /usr/local/bin/llmbox",
      "sudo /usr/local/bin/llmbox bake --bundle /var/tmp/box.tar.zst -- ${var.install_flags}",
      "sudo rm -f /tmp/llmbox /var/tmp/box.tar.zst",
      # Each clone gets a host name, host keys and users of its own from cloud-init.
      "sudo rm -f /etc/ssh/ssh_host_*",
      "rm -f ~/.ssh/authorized_keys",
      "sudo cloud-init clean --logs",
      "sudo /usr/local/bin/llmbox bake --check",
    ]
  }
}
