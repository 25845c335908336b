package e2e

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// openFiles counts the daemon's descriptors.
func openFiles(t *testing.T, n *node.Node) int {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", n.DaemonPID()))
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// mknetd runs out of file descriptors, at several places of an ADD.
func TestNoDescriptorsLeft(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	warm := n.Add(t, "warm", pod, "eth0") // what mknetd opens once is open now
	if err := n.Del(t, warm); err != nil {
		t.Fatal(err)
	}
	rules, open := ruleset(t), openFiles(t, n)
	limit := func(soft int) { // the hard one is not ours to raise again
		t.Helper()
		netlab.Run(t, "prlimit", "--pid", fmt.Sprint(n.DaemonPID()), fmt.Sprintf("--nofile=%d:", soft))
	}
	const usual = 1024
	refused := 0
	for _, spare := range []int{0, 1, 2, 4, 8} {
		limit(openFiles(t, n) + spare)
		_, err := n.CNI(t, node.Call{Verb: "ADD", ContainerID: "c1", Netns: pod.Path(), IfName: "eth0"})
		limit(usual)
		t.Logf("%d descriptors to spare: %v", spare, err)
		if err != nil {
			refused++
			if node.CodeOf(err) != 11 {
				t.Errorf("%d descriptors to spare: %v (code %d), want code 11", spare, err, node.CodeOf(err))
			}
		}
		if _, err := n.CNI(t, node.Call{Verb: "DEL", ContainerID: "c1", Netns: pod.Path(), IfName: "eth0"}); err != nil && node.CodeOf(err) != 11 {
			t.Errorf("DEL: %v", err)
		}
		nothingOf(t, n, pod, rules)
	}
	if refused == 0 {
		t.Error("no ADD met the limit")
	}
	netlab.Eventually(t, node.Patience, func() error {
		if now := openFiles(t, n); now > open {
			return fmt.Errorf("mknetd holds %d descriptors, %d before", now, open)
		}
		return nil
	})
	ep := n.Add(t, "c1", pod, "eth0")
	if err := n.Check(t, ep); err != nil {
		t.Error(err)
	}
	observed(t, finding{"mknetd has no file descriptor left", "ADD 11, nothing of it stays, no descriptor leaks; with a higher limit it works again, no restart"})
}

// addAtWork begins an ADD and returns once mknetd is at it; done has its end.
func addAtWork(t *testing.T, n *node.Node, pod *netlab.Namespace) (done <-chan error) {
	t.Helper()
	end := make(chan error, 1)
	go func() {
		_, err := n.CNI(t, node.Call{Verb: "ADD", ContainerID: "c1", Netns: pod.Path(), IfName: "eth0"})
		end <- err
	}()
	netlab.Eventually(t, node.Patience, func() error {
		if len(n.List(t)) == 0 {
			return fmt.Errorf("the ADD has not begun")
		}
		return nil
	})
	return end
}

// The namespace is removed while its ADD is at work.
func TestNamespaceRemovedDuringAdd(t *testing.T) {
	n := node.Prepare(t)
	path, tell := faultyTools(t, n)
	n.Start(t, path)
	pod := netlab.New(t)
	rules := ruleset(t)
	tell("slow")
	done := addAtWork(t, n, pod)
	pod.Remove(t)
	node.WantCode(t, <-done, 4, "was removed while the ADD was at work")
	tell("")
	noRecords(t, n)
	if after := ruleset(t); after != rules {
		t.Errorf("rules are left:\n%s", after)
	}
	observed(t, finding{"the namespace is removed while its ADD is at work", "ADD 4, says so; the endpoint is rolled back, nothing is left"})
}

// GC while an ADD is at work: nobody can have listed its endpoint yet.
func TestGCSparesAnAddAtWork(t *testing.T) {
	n := node.Prepare(t)
	path, tell := faultyTools(t, n)
	n.Start(t, path)
	pod := netlab.New(t)
	tell("slow")
	done := addAtWork(t, n, pod)
	ctx, cancel := context.WithTimeout(t.Context(), node.Patience)
	defer cancel()
	// Without a list, so that GC may not take it either where the ADD was the faster.
	reply, err := n.Client(t).GC(ctx, api.GCRequest{Network: node.Network})
	if err != nil || len(reply.Deleted) > 0 || len(reply.Errors) > 0 {
		t.Errorf("GC beside an ADD: %+v, %v", reply, err)
	}
	if err := <-done; err != nil {
		t.Fatalf("ADD beside GC: %v", err)
	}
	tell("")
	list := n.List(t)
	if len(list) != 1 || list[0].State != endpoint.Ready {
		t.Fatalf("after ADD and GC the records are %v", list)
	}
	if err := n.Check(t, list[0]); err != nil {
		t.Errorf("CHECK: %v", err)
	}
}

// With every call that changes something hanging in iptables, and CHECKs too, an
// operator still sees what there is.
func TestHungIptablesHangsNoReader(t *testing.T) {
	n := node.Prepare(t)
	path, tell := faultyTools(t, n, "iptables-nft-restore", "iptables-nft-save", "iptables-nft")
	n.Start(t, path)
	pod := netlab.New(t)
	rules := ruleset(t)
	kept := n.Add(t, "kept", netlab.New(t), "eth0")
	tell("hang")
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), node.Patience)
	defer cancel()
	for i := range 40 {
		wg.Go(func() {
			att := endpoint.Attachment{Network: node.Network, ContainerID: fmt.Sprintf("c%d", i), IfName: "eth0"}
			if _, err := n.Client(t).CreateEndpoint(ctx, api.CreateRequest{Attachment: att, NetnsPath: pod.Path()}, nil); err == nil {
				t.Errorf("ADD %d worked without iptables", i)
			}
		})
		wg.Go(func() {
			if _, err := n.Client(t).CheckEndpoint(ctx, kept.Generation, api.Selector{}); err == nil {
				t.Errorf("CHECK %d worked without iptables", i)
			}
		})
	}
	netlab.Eventually(t, node.Patience, func() error {
		if len(n.List(t)) < 2 {
			return fmt.Errorf("no ADD is at work")
		}
		return nil
	})
	began := time.Now()
	if _, err := n.CNI(t, node.Call{Verb: "STATUS"}); err != nil {
		t.Errorf("STATUS: %v", err)
	}
	if out, err := netlab.Try(n.Programs.Daemon, "endpoints", "--socket", n.Socket); err != nil || !strings.Contains(out, kept.Address.String()) {
		t.Errorf("mknetd endpoints: %v\n%s", err, out)
	}
	t.Logf("STATUS and `mknetd endpoints` took %s", time.Since(began))
	wg.Wait()
	tell("")
	netlab.Eventually(t, 2*node.Patience, func() error {
		if left := n.List(t); len(left) != 1 {
			return fmt.Errorf("%d records, want 1", len(left))
		}
		return nil
	})
	if err := n.Check(t, kept); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	if err := n.Del(t, kept); err != nil {
		t.Errorf("DEL: %v", err)
	}
	if after := ruleset(t); after != rules {
		t.Errorf("rules are left:\n%s", after)
	}
	observed(t, finding{"iptables hangs, with 40 ADDs and 40 CHECKs in it", "STATUS and `mknetd endpoints` answer all the same; every ADD and CHECK fails within its time, and nothing of the ADDs is left"})
}
