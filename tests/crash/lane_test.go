package crash

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// lane is one runtime with one pod and one child, over and over.
type lane struct {
	c      *churn
	random *rand.Rand
	name   string
	pod    *netlab.Namespace // of the present sandbox
	child  *netlab.Namespace
	dir    string
	round  int

	agent *running
}

// running is a started program. done is closed when it has ended.
type running struct {
	*process
	done chan struct{}
	exit int // status, valid once done is closed
}

func (r *running) ended() bool {
	select {
	case <-r.done:
		return true
	default:
		return false
	}
}

func newLane(t *testing.T, c *churn, i int, random *rand.Rand) *lane {
	t.Helper()
	l := &lane{c: c, random: random, name: fmt.Sprint("lane", i), child: netlab.New(t), dir: shortDir(t, c.n)}
	netlab.Run(t, c.n.Shim, "token", l.dir+"/token")
	t.Cleanup(func() {
		if l.agent != nil {
			_ = l.agent.Kill() // it may have ended
			<-l.agent.done
		}
		if t.Failed() {
			for _, log := range []string{"shim.log", "agent.log"} {
				text, _ := os.ReadFile(l.dir + "/" + log)
				t.Logf("%s of %s:\n%s", log, l.name, text[max(0, len(text)-3000):])
			}
		}
	})
	return l
}

// start starts a program that may be killed.
func (l *lane) start(program string, argv ...string) (*running, error) {
	cmd, err := spawn(l.dir+"/"+program[3:]+".log", nil, argv...)
	if err != nil {
		return nil, err
	}
	p, unregister := l.c.register(program, cmd.Process)
	r := &running{process: p, done: make(chan struct{})}
	go func() { // ends with the program
		_ = cmd.Wait() // how it ended is judged by its status
		r.exit = cmd.ProcessState.ExitCode()
		unregister()
		close(r.done)
	}()
	return r, nil
}

// pause is what a runtime waits after a call that did not succeed.
const pause = 200 * time.Millisecond

// cycle is the life of one sandbox.
func (l *lane) cycle(t *testing.T) {
	l.round++
	id := fmt.Sprintf("%s-%d", l.name, l.round)
	l.pod = &netlab.Namespace{Name: id}
	if _, err := netlab.Try("ip", "netns", "add", id); err != nil {
		l.c.fail("%s: %w", id, err)
		return
	}
	ip, ok := l.add(t, id)
	if ok {
		l.check(t, id, ip)
		l.carry(id, ip)
	} else {
		time.Sleep(pause)
	}
	l.del(t, id)
	// The namespace goes with its sandbox, also where the DEL is only queued.
	if _, err := netlab.Try("ip", "netns", "del", id); err != nil {
		l.c.fail("%s: %w", id, err)
	}
}

// call makes one call of mk-cni.
func (l *lane) call(t *testing.T, c node.Call) ([]byte, error) {
	l.c.note(l.c.operations, c.Verb)
	c.IfName, c.Netns = "eth0", l.pod.Path()
	unregister := func() {}
	c.Started = func(p *os.Process) { _, unregister = l.c.register("mk-cni", p) }
	out, err := l.c.n.CNI(t, c)
	unregister()
	return out, err
}

// mayFail reports whether a call may end so: its process was killed, or the caller
// is told to try again. Everything else ends the churn.
func (l *lane) mayFail(verb, id string, err error) bool {
	if err == nil {
		return true
	}
	code := node.CodeOf(err)
	if !killed(err) && code != types.ErrTryAgainLater {
		l.c.fail("%s %s: code %d: %w", verb, id, code, err)
		return false
	}
	if code != 0 {
		l.c.note(l.c.refused, verb)
	}
	return true
}

// result is what is read of an ADD's result.
type result struct {
	IPs []struct {
		Address string `json:"address"`
		Gateway string `json:"gateway"`
	} `json:"ips"`
}

// add reports whether the ADD was acknowledged.
func (l *lane) add(t *testing.T, id string) (r result, ok bool) {
	out, err := l.call(t, node.Call{Verb: "ADD", ContainerID: id})
	if !l.mayFail("ADD", id, err) || err != nil {
		return r, false
	}
	if err := json.Unmarshal(out, &r); err != nil || len(r.IPs) != 1 {
		l.c.fail("ADD %s: result %s (%w)", id, out, err)
		return r, false
	}
	return r, true
}

// check holds mknetd to what it acknowledged.
func (l *lane) check(t *testing.T, id string, r result) {
	prev := map[string]any{
		"cniVersion": "1.1.0", "interfaces": []any{map[string]any{"name": "eth0", "sandbox": l.pod.Path()}},
		"ips": []any{map[string]any{"address": r.IPs[0].Address, "gateway": r.IPs[0].Gateway, "interface": 0}},
	}
	_, err := l.call(t, node.Call{Verb: "CHECK", ContainerID: id, Config: map[string]any{"prevResult": prev}})
	l.mayFail("CHECK", id, err)
}

// carry boots the child and has packets pass, unless one of the two that carry
// them is killed.
func (l *lane) carry(id string, r result) {
	sandbox := endpoint.Sandbox{ID: id, Generation: "boot-1"}
	identity, err := json.Marshal(map[string]string{"sandboxID": sandbox.ID, "sandboxGeneration": sandbox.Generation})
	if err == nil {
		err = os.WriteFile(l.dir+"/identity.next", identity, 0o400)
	}
	if err == nil {
		err = os.Rename(l.dir+"/identity.next", l.dir+"/identity.json")
	}
	if err == nil && (l.agent == nil || l.agent.ended()) {
		l.agent, err = l.start("mk-agent", "nsenter", "--net="+l.child.Path(), "--", l.c.n.Agent, "run", "--listen", "unix://"+l.dir+"/agent.sock",
			"--identity", l.dir+"/identity.json", "--token", l.dir+"/token", "--resolv-conf", l.dir+"/resolv.conf")
	}
	if err != nil {
		l.c.fail("%s: start the child: %w", id, err)
		return
	}
	l.c.note(l.c.operations, "BIND")
	shim, err := l.start("mk-shim", l.c.n.Shim, "run", "--socket", l.c.n.Socket, "--network", node.Network, "--container-id", id, "--ifname", "eth0",
		"--sandbox-id", sandbox.ID, "--sandbox-generation", sandbox.Generation, "--agent", "unix://"+l.dir+"/agent.sock",
		"--token", l.dir+"/token", "--stats-dir", l.dir+"/stats")
	if err != nil {
		l.c.fail("%s: start mk-shim: %w", id, err)
		return
	}
	l.traffic(id, r, shim)
	// A runtime ends its shim in order, or dies with it.
	how := syscall.SIGTERM
	if l.random.IntN(4) == 0 {
		how = syscall.SIGKILL
	}
	_ = shim.Signal(how) // it may have ended
	select {
	case <-shim.done:
	case <-time.After(node.Patience):
		l.c.fail("%s: mk-shim does not end after %s", id, how)
	}
}

// Exit codes of mk-shim run, from its package comment.
const (
	exitDaemon = 3
	exitStale  = 4
)

// traffic has the child reach its gateway and the internet.
func (l *lane) traffic(id string, r result, shim *running) {
	deadline := time.Now().Add(node.Patience)
	for {
		l.c.note(l.c.operations, "traffic")
		_, err := l.child.Try("ping", "-c1", "-W1", r.IPs[0].Gateway)
		if err == nil {
			_, err = l.child.Try("ping", "-c1", "-W1", netlab.InternetAddr)
		}
		switch {
		case err == nil, shim.killed.Load(), l.agent.killed.Load():
			return
		case shim.ended():
			// mk-shim waits for a daemon that starts again, but not for ever, and a nonce
			// does not outlive the daemon: the runtime then begins anew.
			if !l.c.daemonDies || shim.exit != exitDaemon && shim.exit != exitStale {
				l.c.fail("%s: mk-shim ended by itself with status %d", id, shim.exit)
			}
			return
		case l.agent.ended():
			l.c.fail("%s: mk-agent ended by itself", id)
			return
		case time.Now().After(deadline):
			l.c.fail("%s: no packet passes: %w", id, err)
			return
		}
	}
}

// del repeats a DEL until it succeeds, as a runtime does.
func (l *lane) del(t *testing.T, id string) {
	deadline := time.Now().Add(2 * node.Patience)
	for {
		_, err := l.call(t, node.Call{Verb: "DEL", ContainerID: id})
		if !l.mayFail("DEL", id, err) || err == nil {
			return
		}
		if time.Now().After(deadline) {
			l.c.fail("DEL %s: never succeeds: %w", id, err)
			return
		}
		time.Sleep(pause)
	}
}
