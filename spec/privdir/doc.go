// Package privdir keeps small files in a folder that belongs to one user alone:
// mk-cni's generation cache and the queue of deferred DELs.
//
// What a program later deletes is decided by what these files say, so nobody else
// may write or swap them. The path is walked component by component and no part
// of it may be a symbolic link; every parent belongs to root or to us and is not
// writable by others (unless sticky, as /tmp is); the folder itself is ours and
// 0700. Files are opened relative to the folder's descriptor, never through the
// path again, without following links, and are checked after the open: regular,
// ours, one name, not readable by others, and still the file that the name means.
//
// Writing is atomic: a reader sees the old content, the new content or no file,
// also when the writer is killed or the disk is full.
package privdir
