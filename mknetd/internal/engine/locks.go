package engine

import (
	"context"
	"sync"
)

// keyedLocks is one mutex per key that exists only while somebody wants it, so
// that it does not grow with the number of endpoints that ever lived.
type keyedLocks[K comparable] struct {
	mu   sync.Mutex
	held map[K]*keyedLock
}

type keyedLock struct {
	token   chan struct{} // holds one token when free
	waiting int           // holders and waiters, guarded by keyedLocks.mu
}

// lock waits for the key and returns its release. It gives up with ctx's error.
func (l *keyedLocks[K]) lock(ctx context.Context, key K) (func(), error) {
	l.mu.Lock()
	if l.held == nil {
		l.held = map[K]*keyedLock{}
	}
	k := l.held[key]
	if k == nil {
		k = &keyedLock{token: make(chan struct{}, 1)}
		k.token <- struct{}{}
		l.held[key] = k
	}
	k.waiting++
	l.mu.Unlock()

	select {
	case <-k.token:
		return func() { k.token <- struct{}{}; l.leave(key, k) }, nil
	case <-ctx.Done():
		l.leave(key, k)
		return nil, context.Cause(ctx)
	}
}

// tryLock is lock for who does not wait: ok is false while somebody has the key.
func (l *keyedLocks[K]) tryLock(key K) (unlock func(), ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held[key] != nil {
		return nil, false
	}
	if l.held == nil {
		l.held = map[K]*keyedLock{}
	}
	k := &keyedLock{token: make(chan struct{}, 1), waiting: 1}
	l.held[key] = k
	return func() { k.token <- struct{}{}; l.leave(key, k) }, true
}

// leave forgets the lock of a key that nobody wants any more.
func (l *keyedLocks[K]) leave(key K, k *keyedLock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if k.waiting--; k.waiting == 0 {
		delete(l.held, key)
	}
}
