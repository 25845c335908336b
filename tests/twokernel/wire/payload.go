package wire

import (
	"crypto/sha256"
	"encoding/hex"
	"math/rand/v2"
)

// What the internet of the tests serves.
const (
	PayloadBytes = 16 << 20
	PayloadPath  = "/16MiB"
	SiteName     = "www.twokernel.test"
	SiteAddr     = "198.51.100.1" // RFC 5737
)

// Payload is the body of PayloadPath: a fixed pseudo-random stream, so that a
// lost, doubled or swapped segment changes its hash.
func Payload() []byte {
	out := make([]byte, PayloadBytes)
	_, _ = rand.NewChaCha8(sha256.Sum256([]byte("mknet two kernels"))).Read(out) // never fails
	return out
}

// PayloadHash is the SHA-256 of Payload in hexadecimal digits.
func PayloadHash() string {
	sum := sha256.Sum256(Payload())
	return hex.EncodeToString(sum[:])
}
