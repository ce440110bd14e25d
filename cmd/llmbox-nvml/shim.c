//go:build cgo && linux

// What each of these is for stands in shim.go and signals.go.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>

// The first version of each architecture, as the lists of glibc's ABI have them
// (sysdeps/unix/sysv/linux/*/libc.abilist); dlinfo came later on x86-64 only.
#if defined(__x86_64__)
#define FIRST "GLIBC_2.2.5"
#define FIRST_DLINFO "GLIBC_2.3.3"
#elif defined(__aarch64__)
#define FIRST "GLIBC_2.17"
#define FIRST_DLINFO "GLIBC_2.17"
#else
#error "no first glibc version is known for this architecture"
#endif

#define BIND(name, version) __asm__(".symver first_" #name "," #name "@" version)

extern int first___libc_start_main(int (*)(int, char **, char **), int, char **,
                                   void (*)(void), void (*)(void), void (*)(void), void *);
BIND(__libc_start_main, FIRST);
int __wrap___libc_start_main(int (*program)(int, char **, char **), int argc, char **argv,
                             void (*init)(void), void (*fini)(void), void (*rtld_fini)(void), void *stack) {
	return first___libc_start_main(program, argc, argv, init, fini, rtld_fini, stack);
}

extern int first_dlclose(void *);
BIND(dlclose, FIRST);
int __wrap_dlclose(void *handle) { return first_dlclose(handle); }

extern char *first_dlerror(void);
BIND(dlerror, FIRST);
char *__wrap_dlerror(void) { return first_dlerror(); }

extern int first_dlinfo(void *, int, void *);
BIND(dlinfo, FIRST_DLINFO);
int __wrap_dlinfo(void *handle, int request, void *info) { return first_dlinfo(handle, request, info); }

extern void *first_dlopen(const char *, int);
BIND(dlopen, FIRST);
void *__wrap_dlopen(const char *name, int flags) { return first_dlopen(name, flags); }

extern void *first_dlsym(void *, const char *);
BIND(dlsym, FIRST);
void *__wrap_dlsym(void *handle, const char *name) { return first_dlsym(handle, name); }

extern int first_pthread_attr_getstack(const pthread_attr_t *, void **, size_t *);
BIND(pthread_attr_getstack, FIRST);
int __wrap_pthread_attr_getstack(const pthread_attr_t *attr, void **address, size_t *size) {
	return first_pthread_attr_getstack(attr, address, size);
}

extern int first_pthread_attr_getstacksize(const pthread_attr_t *, size_t *);
BIND(pthread_attr_getstacksize, FIRST);
int __wrap_pthread_attr_getstacksize(const pthread_attr_t *attr, size_t *size) {
	return first_pthread_attr_getstacksize(attr, size);
}

extern int first_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
BIND(pthread_create, FIRST);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *), void *arg) {
	return first_pthread_create(thread, attr, start, arg);
}

extern int first_pthread_getattr_np(pthread_t, pthread_attr_t *);
BIND(pthread_getattr_np, FIRST);
int __wrap_pthread_getattr_np(pthread_t thread, pthread_attr_t *attr) {
	return first_pthread_getattr_np(thread, attr);
}

extern int first_pthread_key_create(pthread_key_t *, void (*)(void *));
BIND(pthread_key_create, FIRST);
int __wrap_pthread_key_create(pthread_key_t *key, void (*drop)(void *)) {
	return first_pthread_key_create(key, drop);
}

extern int first_pthread_setspecific(pthread_key_t, const void *);
BIND(pthread_setspecific, FIRST);
int __wrap_pthread_setspecific(pthread_key_t key, const void *value) {
	return first_pthread_setspecific(key, value);
}

extern int first_pthread_sigmask(int, const sigset_t *, sigset_t *);
BIND(pthread_sigmask, FIRST);
int __wrap_pthread_sigmask(int how, const sigset_t *set, sigset_t *old) {
	return first_pthread_sigmask(how, set, old);
}

void llmbox_die_by_signal(void) {
	const int deadly[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGTRAP};
	for (size_t i = 0; i < sizeof deadly / sizeof *deadly; i++) {
		struct sigaction plain = {.sa_handler = SIG_DFL};
		sigaction(deadly[i], &plain, NULL);
	}
}
