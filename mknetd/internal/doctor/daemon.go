package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"mknet/spec/api"
	"mknet/spec/delqueue"
	"mknet/spec/endpoint"
)

func checkConfig(_ context.Context, n *Node) []Finding {
	if n.ConfigErr == nil {
		return nil
	}
	return []Finding{{
		Severity: Error, What: n.ConfigErr.Error(),
		Why: "mknetd does not start with it; one that runs goes on until it is restarted. The other checks go by the defaults",
		Do:  "correct it, then: mknetd config check --config " + n.ConfigAt,
	}}
}

func checkDaemon(_ context.Context, n *Node) []Finding {
	if n.daemonErr == nil {
		return nil
	}
	return []Finding{{
		Severity: Error, What: fmt.Sprintf("mknetd does not answer on %s: %v", n.Config.Socket, n.daemonErr),
		Why: "no endpoint can be made, DELs are queued; endpoints that stand go on. What only mknetd knows was not looked at",
		Do:  "systemctl status mknetd; or mknetd serve, whose first lines say what is wrong",
	}}
}

func checkVersion(_ context.Context, n *Node) []Finding {
	if n.daemonErr != nil || n.health.Version == n.Version {
		return nil
	}
	return []Finding{{
		Severity: Note, What: fmt.Sprintf("mknetd that runs is version %s, this program is %s", n.health.Version, n.Version),
		Why: "what the new version mends is not in force",
		Do:  "mknetd serve --takeover, or restart the service",
	}}
}

func checkHealth(_ context.Context, n *Node) []Finding {
	if n.daemonErr != nil {
		return nil
	}
	var found []Finding
	for _, c := range n.health.Causes {
		f := Finding{
			Severity: Warning, What: c.Code + ": " + c.Message, Why: "mknetd works, but not for everything",
			Do: "mknetd endpoints; the text names the rest",
		}
		if c.Blocks {
			f.Severity, f.Why = Error, "mknetd refuses every ADD until this is gone"
		}
		found = append(found, f)
	}
	return found
}

// owned says what is wrong with the owner and mode of a path that only root may
// change.
func owned(path string) string {
	fi, err := os.Lstat(path)
	if err != nil {
		return err.Error()
	}
	st, ok := fi.Sys().(*unixStat)
	switch {
	case fi.Mode()&fs.ModeSymlink != 0:
		return path + " is a symbolic link"
	case ok && st.Uid != 0:
		return fmt.Sprintf("%s belongs to uid %d", path, st.Uid)
	case fi.Mode().Perm()&0o022 != 0 && fi.Mode()&fs.ModeSticky == 0:
		return fmt.Sprintf("%s has mode %#o: others may write to it", path, fi.Mode().Perm())
	}
	return ""
}

func checkSocket(_ context.Context, n *Node) []Finding {
	var found []Finding
	complain := func(what, do string) {
		found = append(found, Finding{Severity: Error, What: what, Why: "whoever may change it can stand in for mknetd, or call it as root", Do: do})
	}
	for dir := filepath.Dir(n.Config.Socket); ; dir = filepath.Dir(dir) {
		if wrong := owned(dir); wrong != "" {
			complain(wrong, "chown root:root "+dir+"; chmod go-w "+dir)
		}
		if dir == "/" {
			break
		}
	}
	fi, err := os.Lstat(n.Config.Socket)
	if err != nil {
		return found // that nobody answers is said elsewhere
	}
	want := fs.FileMode(0o600)
	if n.Config.SocketGroup != "" {
		want = 0o660
	}
	st, ok := fi.Sys().(*unixStat)
	switch {
	case fi.Mode().Type() != fs.ModeSocket:
		complain(n.Config.Socket+" is no socket", "remove it and restart mknetd")
	case ok && st.Uid != 0:
		complain(fmt.Sprintf("socket %s belongs to uid %d", n.Config.Socket, st.Uid), "chown root "+n.Config.Socket)
	case fi.Mode().Perm()&^want != 0:
		complain(fmt.Sprintf("socket %s has mode %#o, want %#o", n.Config.Socket, fi.Mode().Perm(), want), fmt.Sprintf("chmod %#o %s", want, n.Config.Socket))
	}
	return found
}

// roomBytes is what the folder of the records should have free: a full store
// twice over needs less.
const roomBytes = 64 << 20

func checkFolders(_ context.Context, n *Node) []Finding {
	var found []Finding
	for _, dir := range []string{n.Config.StateDir, n.Config.DeferredDelDir} {
		_, err := os.Lstat(dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue // mknetd and mk-cni make them
		}
		if wrong := owned(dir); wrong != "" {
			found = append(found, Finding{
				Severity: Error, What: wrong, Why: "records and deferred DELs decide what is removed from the kernel: only root may write them",
				Do: "chown root:root " + dir + "; chmod 0700 " + dir,
			})
		}
		var st unix.Statfs_t
		if unix.Statfs(dir, &st) != nil {
			continue
		}
		switch free := st.Bavail * uint64(st.Bsize); {
		case st.Flags&unix.ST_RDONLY != 0:
			found = append(found, Finding{Severity: Error, What: dir + " is on a file system that is mounted read-only", Why: "no record can be written: every ADD and DEL fails", Do: "mount -o remount,rw " + dir + "; dmesg says why it is"})
		case free < roomBytes:
			found = append(found, Finding{
				Severity: Error, What: fmt.Sprintf("%s has %d MiB free", dir, free>>20), Why: "without room no record can be written: every ADD and DEL fails",
				Do: "make room on the file system: df -h " + dir,
			})
		}
	}
	return found
}

func checkPools(_ context.Context, n *Node) []Finding {
	if n.daemonErr != nil {
		return nil
	}
	var found []Finding
	pool := func(name string, total, free uint32) {
		if total == 0 || uint64(free)*10 > uint64(total) {
			return
		}
		f := Finding{
			Severity: Warning, What: fmt.Sprintf("%s: %d of %d addresses are left", name, free, total),
			Why: "an ADD fails once they are gone", Do: "delete endpoints that nobody uses (mknetd endpoints), or configure a larger pool",
		}
		if free == 0 {
			f.Severity = Error
		}
		found = append(found, f)
	}
	pool("child pool "+n.inForce.ChildPool.String(), n.Config.Pools.Slots(), n.health.FreeSlots)
	for _, p := range n.inForce.Pools {
		for _, c := range n.Config.PodPools {
			if c.Name == p.Name {
				pool("pool "+p.Name+" "+p.Prefix.String(), c.Slots(), p.Free)
			}
		}
	}
	return found
}

// waitsTooLong is when a deferred DEL should have been done by a running mknetd.
const waitsTooLong = time.Minute

func checkDeferred(_ context.Context, n *Node) []Finding {
	q, err := delqueue.OpenExisting(n.Config.DeferredDelDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return []Finding{{Severity: Error, What: err.Error(), Why: "mk-cni cannot queue a DEL while mknetd is away, and reports an error instead", Do: "make it a folder of root with mode 0700"}}
	}
	defer q.Close()
	items, err := q.List()
	if err != nil {
		return unlooked("deferred DELs", err)
	}
	var found []Finding
	waiting, oldest := 0, time.Time{}
	for _, it := range items {
		if it.Err != nil {
			found = append(found, Finding{
				Severity: Warning, What: fmt.Sprintf("deferred DEL %s cannot be read: %v", it.File, it.Err),
				Why: "its endpoint may never be deleted", Do: "mknetd inventory names what is left over; then remove " + filepath.Join(n.Config.DeferredDelDir, it.File),
			})
			continue
		}
		if waiting++; oldest.IsZero() || it.Entry.QueuedAt.Before(oldest) {
			oldest = it.Entry.QueuedAt
		}
	}
	age := n.now().Sub(oldest).Round(time.Second)
	switch {
	case waiting == 0:
	case n.daemonErr != nil:
		found = append(found, Finding{Severity: Note, What: fmt.Sprintf("%d deferred DELs wait, the oldest for %s", waiting, age), Why: "their endpoints stand until mknetd is back", Do: "start mknetd"})
	case age > waitsTooLong:
		found = append(found, Finding{
			Severity: Warning, What: fmt.Sprintf("%d deferred DELs wait, the oldest for %s, although mknetd runs", waiting, age),
			Why: "they were meant for a daemon on another socket, or mknetd refuses them", Do: "mknetd's log: replayed deferred DELs; ls -l " + n.Config.DeferredDelDir,
		})
	}
	return found
}

// maxObjects bounds how many findings one check makes of the inventory.
const maxObjects = 200

func checkObjects(ctx context.Context, n *Node) []Finding {
	if n.daemonErr != nil {
		return nil
	}
	inv, err := n.client.Inventory(ctx)
	if err != nil {
		return unlooked("inventory", err)
	}
	var found []Finding
	list := different(inv.Items)
	for i, d := range list {
		if i == maxObjects {
			found = append(found, Finding{Severity: Error, What: fmt.Sprintf("%d more objects differ", len(list)-i), Why: "the list is cut here", Do: "mknetd inventory | grep -v recorded"})
			break
		}
		whose := ""
		if !d.Generation.IsZero() {
			whose = " of endpoint " + d.Generation.Short()
		}
		if d.others > 0 {
			whose += fmt.Sprintf(" and %d others", d.others)
		}
		f := Finding{
			Severity: Error, What: fmt.Sprintf("%s %s (%s)%s is %s: %s", d.Kind, d.Object, d.Where, whose, d.Status, d.Problem),
			Why: "the endpoint's packets, or what keeps it apart from others, depend on it",
			Do:  "the next audit mends what is safe; look: " + d.Inspect,
		}
		if d.Status == api.Orphan {
			f.Severity, f.Why, f.Do = Warning, "it takes a name or an address and belongs to nobody", "restart mknetd, which removes it: mknetd serve --takeover"
		}
		found = append(found, f)
	}
	return found
}

// difference is an object that is not as recorded.
type difference struct {
	api.InventoryItem
	others int // endpoints that rely on the same object
}

// different returns what is not as recorded. An object of the host that many
// endpoints rely on (the egress's forwarding) is one difference.
func different(items []api.InventoryItem) []difference {
	var out []difference
	at := map[api.InventoryItem]int{}
	for _, it := range items {
		if it.Status == api.Recorded || it.Status == api.Shared {
			continue
		}
		key := it
		if it.Where == endpoint.InHost {
			key.Generation = endpoint.Generation{}
		}
		if i, known := at[key]; known && it.Where == endpoint.InHost {
			out[i].others++
			continue
		}
		at[key] = len(out)
		out = append(out, difference{InventoryItem: it})
	}
	return out
}

func checkMetrics(ctx context.Context, n *Node) []Finding {
	if n.daemonErr != nil || n.Config.MetricsAddress == "" {
		return nil
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+n.Config.MetricsAddress+"/healthz", nil)
	if err != nil {
		return unlooked("metrics listener", err)
	}
	resp, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(req)
	if err == nil {
		defer resp.Body.Close()
		if resp.StatusCode == http.StatusOK {
			return nil
		}
		err = fmt.Errorf("status %s", resp.Status)
	}
	return []Finding{{
		Severity: Warning, What: fmt.Sprintf("metrics at %s: %s", n.Config.MetricsAddress, strings.TrimSpace(err.Error())),
		Why: "Prometheus sees nothing of this node", Do: "somebody else may have the port: ss -ltnp; mknetd's log says what it met; restart it after a change of the configuration",
	}}
}
