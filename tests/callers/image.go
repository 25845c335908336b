package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
)

// The one image of the matrix: a static busybox. It is the pods' image and their
// pause image.
const (
	imageName = "docker.io/library/mknet-busybox:1"
	pauseName = "registry.k8s.io/pause:3.10"
)

// applets are the commands that the image has.
var applets = []string{"sh", "sleep", "ip", "cat", "touch"}

// rootfs makes the image's file tree and returns its folder.
func (s *session) rootfs() (string, error) {
	dir := filepath.Join(s.dir, "rootfs")
	for _, sub := range []string{"bin", "etc", "proc", "sys", "dev", "tmp", "run"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return "", err
		}
	}
	program, err := exec.LookPath("busybox")
	if err != nil {
		return "", err
	}
	raw, err := os.ReadFile(program)
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(dir, "bin", "busybox"), raw, 0o755); err != nil {
		return "", err
	}
	for _, name := range applets {
		if err := os.Symlink("busybox", filepath.Join(dir, "bin", name)); err != nil {
			return "", err
		}
	}
	return dir, nil
}

// image writes an OCI archive with the tree under both names (OCI image-spec
// v1.1, image-layout.md) and returns its path.
func (s *session) image() (string, error) {
	rootfs, err := s.rootfs()
	if err != nil {
		return "", err
	}
	var layer bytes.Buffer
	tw := tar.NewWriter(&layer)
	if err := tw.AddFS(os.DirFS(rootfs)); err != nil {
		return "", fmt.Errorf("pack the image's layer: %w", err)
	}
	if err := tw.Close(); err != nil {
		return "", err
	}
	archive := ociArchive{}
	layerRef := archive.blob("application/vnd.oci.image.layer.v1.tar", layer.Bytes())
	config := archive.document("application/vnd.oci.image.config.v1+json", map[string]any{
		"architecture": runtime.GOARCH, "os": "linux",
		"config": map[string]any{"Cmd": []string{"/bin/sleep", "3600"}, "Env": []string{"PATH=/bin"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{layerRef.Digest}},
	})
	manifest := archive.document("application/vnd.oci.image.manifest.v1+json", map[string]any{
		"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": config, "layers": []descriptor{layerRef},
	})
	var manifests []descriptor
	for _, name := range []string{imageName, pauseName} {
		m := manifest
		m.Annotations = map[string]string{"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}
		manifests = append(manifests, m)
	}
	path := filepath.Join(s.dir, "image.tar")
	return path, archive.write(path, manifests)
}

// descriptor points at a blob.
type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// ociArchive collects the blobs of an image layout, by digest.
type ociArchive map[string][]byte

func (a ociArchive) blob(mediaType string, data []byte) descriptor {
	sum := fmt.Sprintf("%x", sha256.Sum256(data))
	a[sum] = data
	return descriptor{MediaType: mediaType, Digest: "sha256:" + sum, Size: len(data)}
}

func (a ociArchive) document(mediaType string, v any) descriptor {
	raw, err := json.Marshal(v)
	if err != nil {
		panic(err) // maps of strings
	}
	return a.blob(mediaType, raw)
}

func (a ociArchive) write(path string, manifests []descriptor) error {
	index, err := json.Marshal(map[string]any{"schemaVersion": 2, "manifests": manifests})
	if err != nil {
		return err
	}
	var out bytes.Buffer
	tw := tar.NewWriter(&out)
	files := map[string][]byte{"oci-layout": []byte(`{"imageLayoutVersion":"1.0.0"}`), "index.json": index}
	for sum, data := range a {
		files["blobs/sha256/"+sum] = data
	}
	for name, data := range files {
		if err := tw.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(data))}); err != nil {
			return err
		}
		if _, err := tw.Write(data); err != nil {
			return err
		}
	}
	if err := tw.Close(); err != nil {
		return err
	}
	return os.WriteFile(path, out.Bytes(), 0o644)
}
