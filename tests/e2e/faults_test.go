package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// faultyTools puts a folder in front of mknetd's PATH whose iptables programs do
// what the returned function was last told: "" works, "fail" fails, "hang" hangs,
// "slow" takes its time. Without names it is those that change something.
func faultyTools(t *testing.T, n *node.Node, names ...string) (env string, tell func(string)) {
	t.Helper()
	dir := n.Dir + "/tools"
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	mode := dir + "/mode"
	if len(names) == 0 {
		names = []string{"iptables-nft-restore", "iptables-legacy-restore"}
	}
	for _, tool := range names {
		real, err := exec.LookPath(tool)
		if err != nil {
			t.Fatal(err)
		}
		script := fmt.Sprintf("#!/bin/sh\ncase $(cat %s 2>/dev/null) in\nfail) echo injected fault >&2; exit 1;;\nhang) exec sleep 600;;\nslow) sleep 0.3;;\nesac\nexec %s \"$@\"\n", mode, real)
		if err := os.WriteFile(dir+"/"+tool, []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return "PATH=" + dir + ":" + os.Getenv("PATH"), func(what string) {
		t.Helper()
		if err := os.WriteFile(mode+".new", []byte(what), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(mode+".new", mode); err != nil {
			t.Fatal(err)
		}
	}
}

// A rule stayed after a first DEL had failed midway.
func TestC08_ASecondDelCleansWhatTheFirstCouldNot(t *testing.T) {
	n := node.Prepare(t)
	path, tell := faultyTools(t, n)
	n.Start(t, path)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	tell("fail")
	// Not by mk-cni, which queues a DEL that a busy machine makes longer than it waits.
	if _, err := n.Client(t).DeleteEndpoint(t.Context(), ep.Generation); api.CodeOf(err) != api.Unavailable {
		t.Errorf("DEL with failing iptables: got %v, want one that may be repeated", err)
	}
	if got := n.Endpoint(t, ep.Generation); got == nil || got.State != endpoint.Deleting {
		t.Errorf("after the failed DEL the record is %v, want DELETING", got)
	}
	tell("")
	if _, err := n.CNI(t, node.Call{Verb: "DEL", ContainerID: ep.ContainerID, IfName: ep.IfName}); err != nil {
		t.Errorf("second DEL, without namespace: %v", err)
	}
	waitGone(t, n, ep)
	observed(t, finding{"iptables fails in a DEL", "DEL 11, the record is DELETING; a second DEL, even without the namespace, finishes it"})
}

// An ADD that fails in the middle leaves nothing, whatever fails.
func TestFailedAddLeavesNothing(t *testing.T) {
	n := node.Prepare(t)
	path, tell := faultyTools(t, n)
	n.Start(t, path)
	pod := netlab.New(t)
	before := ruleset(t)
	for _, fault := range []string{"fail", "hang"} {
		tell(fault)
		if _, err := n.CNI(t, node.Call{Verb: "ADD", ContainerID: "c1", Netns: pod.Path(), IfName: "eth0"}); err == nil {
			t.Errorf("ADD with iptables that %ss succeeded", fault)
		}
		tell("")
		// Undoing needs iptables too: what could not be undone is tried again.
		netlab.Eventually(t, node.Patience, func() error {
			if left := n.List(t); len(left) != 0 {
				return fmt.Errorf("%d records are left", len(left))
			}
			return nil
		})
		if after := ruleset(t); after != before {
			t.Errorf("%s: rules are left:\n%s", fault, after)
		}
		if out := pod.Run(t, "ip", "-br", "link"); strings.Contains(out, "eth0") || strings.Contains(out, "mkhost") {
			t.Errorf("%s: links are left:\n%s", fault, out)
		}
	}
	ep := n.Add(t, "c1", pod, "eth0")
	if err := n.Del(t, ep); err != nil {
		t.Error(err)
	}
	observed(t, finding{"iptables fails, or hangs, in an ADD", "ADD fails within its time; nothing is left, in namespace, rules and records"})
}

// The xtables lock was held by another process: callers got half an ADD.
func TestC18_AHeldXtablesLockGivesAllOrNothing(t *testing.T) {
	n := node.New(t, "firewall: legacy")
	lock, err := os.OpenFile("/run/xtables.lock", os.O_CREATE|os.O_RDONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	pods := make([]*netlab.Namespace, 8)
	for i := range pods {
		pods[i] = netlab.New(t)
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	released := make(chan struct{})
	go func() {
		defer close(released)
		time.Sleep(8 * time.Second)
		_ = syscall.Flock(int(lock.Fd()), syscall.LOCK_UN)
	}()
	defer func() { <-released }()
	var wg sync.WaitGroup
	worked := make([]bool, len(pods))
	for i, pod := range pods {
		wg.Go(func() {
			_, err := n.CNI(t, node.Call{Verb: "ADD", ContainerID: fmt.Sprintf("c%d", i), Netns: pod.Path(), IfName: "eth0"})
			worked[i] = err == nil
			if err != nil && node.CodeOf(err) != 11 {
				t.Errorf("ADD under a held lock: %v (code %d), want code 11", err, node.CodeOf(err))
			}
		})
	}
	wg.Wait()
	netlab.Eventually(t, node.Patience, func() error {
		for _, ep := range n.List(t) {
			if ep.State != endpoint.Ready {
				return fmt.Errorf("endpoint %s is %s", ep.Generation, ep.State)
			}
		}
		return nil
	})
	have := map[string]endpoint.Endpoint{}
	for _, ep := range n.List(t) {
		have[ep.ContainerID] = ep
	}
	for i := range pods {
		ep, recorded := have[fmt.Sprintf("c%d", i)]
		if recorded != worked[i] {
			t.Errorf("c%d: ADD worked: %v, recorded: %v", i, worked[i], recorded)
		}
		if recorded {
			if err := n.Check(t, ep); err != nil {
				t.Errorf("c%d: CHECK: %v", i, err)
			}
			if err := n.Del(t, ep); err != nil {
				t.Errorf("c%d: DEL: %v", i, err)
			}
		}
	}
	observed(t, finding{"another process holds the xtables lock for 8 s, 8 ADDs at once", "each is whole or 11; what is reported is what is recorded"})
}
