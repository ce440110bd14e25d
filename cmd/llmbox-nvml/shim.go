//go:build cgo && linux

package main

// glibc 2.32 to 2.34 gave new versions to functions that the C start-up code and
// Go's own runtime/cgo use, because libpthread and libdl were merged into libc. A
// program linked on such a system asks for those versions and does not start on an
// older one, though nothing in the functions differs. The linker sends each call
// to its namesake in shim.c, which is bound to the version that every glibc of the
// architecture has, and the libraries that used to hold them are named again. The
// floor that this leaves is gpu.GlibcFloor.

// #cgo LDFLAGS: -Wl,--wrap=__libc_start_main
// #cgo LDFLAGS: -Wl,--wrap=dlclose -Wl,--wrap=dlerror -Wl,--wrap=dlinfo -Wl,--wrap=dlopen -Wl,--wrap=dlsym
// #cgo LDFLAGS: -Wl,--wrap=pthread_attr_getstack -Wl,--wrap=pthread_attr_getstacksize
// #cgo LDFLAGS: -Wl,--wrap=pthread_create -Wl,--wrap=pthread_getattr_np
// #cgo LDFLAGS: -Wl,--wrap=pthread_key_create -Wl,--wrap=pthread_setspecific -Wl,--wrap=pthread_sigmask
// #cgo LDFLAGS: -Wl,--no-as-needed -l:libpthread.so.0 -l:libdl.so.2
import "C"
