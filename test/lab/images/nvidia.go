package images

import (
	"io/fs"
	"os"
	"path/filepath"

	"github.com/llmbox-dev/llmbox/test/lab/programs"
)

// gpuOperator lists what the GPU Operator's release consists of. Programs that open
// NVML find it only where the container runtime hands it in, as with upstream's images.
func (c *catalogue) gpuOperator() {
	const name = "gpu-operator"
	c.add(c.ref(name, "operator"), one("gpu-operator", "/usr/bin/gpu-operator"), user("gpu-operator"), visibleDevices("void"), func(i *Image) {
		i.Files = append(i.Files, File{Path: "/etc/passwd", Content: "root:x:0:0:root:/root:/bin/bash\ngpu-operator:x:1000:1000::/home/gpu-operator:/bin/bash\n"})
	}, c.beside("gpu-operator", "assets", "/opt/gpu-operator"), c.beside("gpu-operator", "manifests", "/opt/gpu-operator/manifests"))
	// The workload's vectorAdd needs CUDA; what takes its place needs the driver.
	c.add(c.ref(name, "validator"), shell, libc, func(i *Image) {
		i.Program, i.Entrypoint = "nvidia-validator, vectorAdd replaced", []string{"/bin/bash"}
		i.Files = append(i.Files, File{Path: "/usr/bin/nvidia-validator", Source: "nvidia-validator"},
			File{Path: "/usr/bin/vectorAdd", Content: "#!/bin/sh\n# Stand-in: no CUDA runs here.\nexec nvidia-smi\n", Mode: 0o755})
	}, c.beside("nvidia-validator", "validator", "/var/nvidia/manifests"), visibleDevices("void"))
	c.add(c.ref(name, "devicePlugin"), shell, libc, func(i *Image) {
		i.Program, i.Entrypoint = "nvidia-device-plugin, gpu-feature-discovery, config-manager", []string{"nvidia-device-plugin"}
		for _, program := range []string{"nvidia-device-plugin", "gpu-feature-discovery", "config-manager"} {
			i.Files = append(i.Files, File{Path: "/usr/bin/" + program, Source: program})
		}
	}, visibleDevices("all"))
	c.add(c.ref(name, "dcgmExporter"), one("dcgm-exporter-standin", "/usr/bin/dcgm-exporter"), libc, standIn, visibleDevices("all"))
	c.add(c.ref(name, "nfd"), user("65534:65534"), func(i *Image) {
		i.Program = "nfd-master, nfd-worker, nfd-gc"
		for _, program := range []string{"nfd-master", "nfd-worker", "nfd-gc"} {
			i.Files = append(i.Files, File{Path: "/usr/bin/" + program, Source: program})
		}
		i.Files = append(i.Files, File{Path: "/tmp/", Mode: 0o1777})
	})
}

// visibleDevices is what NVIDIA's runtime reads where a pod sets nothing.
func visibleDevices(which string) func(*Image) {
	return func(i *Image) { i.Env = append(i.Env, "NVIDIA_VISIBLE_DEVICES="+which) }
}

// beside adds the files that were collected with a program.
func (c *catalogue) beside(program, folder, to string) func(*Image) {
	return func(i *Image) {
		root := filepath.Join(c.dir, programs.Files(program), folder)
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			below, err := filepath.Rel(root, path)
			if err != nil {
				return err
			}
			i.Files = append(i.Files, File{Path: to + "/" + filepath.ToSlash(below), Source: path, Mode: 0o644})
			return nil
		})
		if err != nil {
			// Named as missing, as a program that was not built.
			i.Files = append(i.Files, File{Path: to + "/", Source: root})
		}
	}
}

// libc adds the machine's C library, for programs that open another library or are
// handed one.
func libc(i *Image) {
	const dir = "/lib/x86_64-linux-gnu/"
	i.Files = append(i.Files, File{Path: "/lib64/ld-linux-x86-64.so.2", Source: "/lib64/ld-linux-x86-64.so.2"})
	for _, lib := range []string{"libc.so.6", "libdl.so.2", "libpthread.so.0", "libm.so.6"} {
		if _, err := os.Stat(dir + lib); err == nil || lib == "libc.so.6" {
			i.Files = append(i.Files, File{Path: dir + lib, Source: dir + lib})
		}
	}
}

// shell is Debian's busybox under the names that the operator's scripts use, bash
// among them: they use nothing of it that busybox does not know.
func shell(i *Image) {
	i.Files = append(i.Files, File{Path: "/bin/busybox", Source: "/bin/busybox"}, File{Path: "/tmp/", Mode: 0o1777},
		File{Path: "/bin/bash", Content: "#!/bin/busybox sh\nexec /bin/busybox sh \"$@\"\n", Mode: 0o755})
	for _, name := range []string{"sh", "cat", "chroot", "echo", "grep", "lsmod", "rm", "sleep", "stat", "test"} {
		i.Files = append(i.Files, File{Path: "/bin/" + name, Link: "busybox"})
	}
}
