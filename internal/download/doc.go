// Package download brings files over HTTP(S) onto a disk: as fast as the link allows,
// the right bytes or none, and from where it stopped when it was interrupted. Models,
// container images and programs are built on it; it must not know any of them, nor who
// shows the progress.
//
// # Requests
//
// A Client holds what all downloads of a run share: proxy, certificate authorities,
// deadlines, bandwidth, connections, and headers that belong to a host. Its Transport
// keeps to all of that, so that other clients (a registry's) can be built on it; With
// does the opposite and puts such a client's round tripper in front. HTTP/1.1 alone is
// spoken, because ranges side by side are to be connections side by side.
//
// Redirects are followed here and not by net/http: each hop is a new request to which
// nothing but range and conditions is carried over. A header that is bound to an origin
// (scheme, host, port) is set on requests to that origin, so it can't reach another host
// and can't fall from https to http. Queries of URLs often are signatures: they are in no
// error and in no file.
//
// # Fetch
//
// Fetch makes one file complete at its path:
//
//	target there with the right digest?  ─ yes ─►  done, nothing is asked
//	lock TARGET.part                     (another process: wait, look again)
//	read TARGET.part.state               what of TARGET.part can be trusted
//	first answer                         size, validator, whether ranges are honoured
//	reserve the disk                     or say how much is missing, before writing
//	workers ─► TARGET.part ─► hash       in order, behind the first gap
//	size, digest, mode, fsync, rename, fsync of the directory
//
// Workers take the first piece that nobody has, so the part that is complete from the
// start grows steadily. The hash follows it: buffers that arrive in order are handed
// over, the others are read back a moment later, from the page cache. Memory is some
// buffers a connection whatever the size of the file. When nothing is left to take, the
// largest piece under way is halved. There is no HEAD: the first range is the probe, and
// an answer without a range is simply the whole file.
//
// # What is trusted after a crash
//
// TARGET.part.state has two lines, each with a checksum. The first is written to another
// file, synced and renamed, after the data that it names was synced: it holds for ever.
// The second is overwritten in place, without a sync, whenever some data was handed to
// the kernel: it outlives the process and not the machine, so it names the boot it is
// from and counts in that alone. That way a killed process repeats next to nothing while
// the disk is asked to sync only now and then.
//
// Ranges are put together when they are of one thing: same size, and per URL the same
// ETag (or Last-Modified), asked for by If-Range and compared in the answer. A change
// starts the file over. Mirrors have validators of their own and are mixed only when
// there is a digest that judges the result; without one, a file comes from one URL whole.
//
// # Failures
//
// Failures are of four kinds. What another try may mend (reset, cut, silence, too slow,
// 408, 425, 429, 5xx) is tried again: at once where bytes had come, else on the next
// mirror, or after a growing, jittered pause; Retry-After is obeyed up to a limit. What
// is final for a URL (401, 403, 404, a certificate, a loop of redirects, a wrong size)
// leaves it to the other mirrors. What is final for the file (disk full) ends it. And
// what makes the bytes worthless (a changed ETag, a wrong digest) throws them away and
// starts over: after a wrong digest with a single stream, since a server that gets ranges
// wrong is the likeliest cause, and the same wrong digest twice is the server's last
// word. Each failure is a type for errors.As, with what to do in its text.
package download
