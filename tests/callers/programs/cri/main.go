// Command cri runs one pod through the container runtime interface, as kubelet
// would: status, sandbox, container, exec, stop twice, remove.
//
//	usage: cri SOCKET IMAGE [HOOK...]
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"mknet/tests/callers/programs/step"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: cri SOCKET IMAGE [HOOK...]")
		os.Exit(2)
	}
	conn, err := grpc.NewClient("unix://"+os.Args[1], grpc.WithTransportCredentials(insecure.NewCredentials()))
	step.Must("connect", err)
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	run(ctx, cri.NewRuntimeServiceClient(conn), os.Args[2])
	step.End()
}

func run(ctx context.Context, rt cri.RuntimeServiceClient, image string) {
	step.Must("NetworkReady", networkReady(ctx, rt))
	pod := &cri.PodSandboxConfig{
		Metadata:     &cri.PodSandboxMetadata{Name: "pod1", Namespace: "default", Uid: "uid-1"},
		Hostname:     "pod1",
		DnsConfig:    &cri.DNSConfig{Servers: []string{"203.0.113.53"}, Searches: []string{"svc.cluster.local"}},
		PortMappings: []*cri.PortMapping{{Protocol: cri.Protocol_TCP, HostPort: 8083, ContainerPort: 80}},
		Linux:        &cri.LinuxPodSandboxConfig{CgroupParent: "/mknet-callers"},
	}
	sandbox, err := rt.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: pod})
	step.Must("RunPodSandbox", err)
	id := sandbox.GetPodSandboxId()
	status, err := rt.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: id})
	if step.OK("PodSandboxStatus", err) && status.GetStatus().GetNetwork().GetIp() == "" {
		step.OK("the pod has an address", errors.New("PodSandboxStatus has none"))
	}
	container(ctx, rt, pod, id, image)
	step.Hook(os.Args[3:])
	_, err = rt.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: id})
	step.OK("StopPodSandbox", err)
	_, err = rt.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: id})
	step.OK("StopPodSandbox again", err)
	_, err = rt.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: id})
	step.OK("RemovePodSandbox", err)
}

// container runs a command inside the pod and looks for its interface.
func container(ctx context.Context, rt cri.RuntimeServiceClient, pod *cri.PodSandboxConfig, id, image string) {
	c, err := rt.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: id, SandboxConfig: pod, Config: &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: "c1"}, Image: &cri.ImageSpec{Image: image},
		Command: []string{"/bin/sleep", "600"}, Linux: &cri.LinuxContainerConfig{},
	}})
	if !step.OK("CreateContainer", err) {
		return
	}
	_, err = rt.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: c.GetContainerId()})
	if !step.OK("StartContainer", err) {
		return
	}
	out, err := rt.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: c.GetContainerId(), Cmd: []string{"/bin/ip", "link", "show", "dev", "eth0"}, Timeout: 30})
	if err == nil && out.GetExitCode() != 0 {
		err = fmt.Errorf("exit %d: %s%s", out.GetExitCode(), out.GetStdout(), out.GetStderr())
	}
	step.OK("eth0 is in the container", err)
}

// networkReady polls the runtime's condition: it loads the CNI folder in the
// background after its start.
func networkReady(ctx context.Context, rt cri.RuntimeServiceClient) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		last := errors.New("no NetworkReady condition")
		reply, err := rt.Status(ctx, &cri.StatusRequest{})
		if err != nil {
			last = err
		}
		for _, c := range reply.GetStatus().GetConditions() {
			if c.GetType() != cri.NetworkReady {
				continue
			}
			if c.GetStatus() {
				return nil
			}
			last = fmt.Errorf("%s: %s", c.GetReason(), c.GetMessage())
		}
		select {
		case <-ctx.Done():
			return last
		case <-time.After(100 * time.Millisecond):
		}
	}
}
