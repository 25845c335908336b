package main

import "os"

// What the third act puts in force. Pods take HTTP from each other and nothing
// else; children reach everything but HTTP on one server.
const (
	groupFile = "/etc/mknetd/pods.yaml"
	group     = `apiVersion: mknet/v1
kind: SecurityGroup
metadata: {name: web}
spec:
  ingress:
  - from: [{securityGroupRef: {name: web}}]
    protocol: tcp
    ports: [{port: 80}]
---
apiVersion: mknet/v1
kind: Attachment
metadata: {name: web}
spec:
  securityGroupRefs: [{name: web}]
  endpoints: [{network: mkpods}]
`
	aclFile = "/etc/mknetd/children.yaml"
	acl     = `apiVersion: mknet/v1
kind: NetworkACL
metadata: {name: children}
spec:
  egress:
  - {priority: 10, action: deny, protocol: tcp, cidr: ` + internetAddr + `/32, ports: [{port: 80}]}
  - {priority: 20, action: allow}
---
apiVersion: mknet/v1
kind: Attachment
metadata: {name: children}
spec:
  networkACLRef: {name: children}
  pools: [children]
`
)

// policy is the third act: documents for pods and children, what they allow and
// refuse, and that the model says the same before.
func (d *demo) policy(a, b *pod) error {
	d.chapter("Third act: who may talk to whom")
	for path, text := range map[string]string{groupFile: group, aclFile: acl} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			return err
		}
	}
	child := d.children[0]
	mknetd := d.bin + "/mknetd "
	internet := child.in() + "curl -s --max-time 2 http://" + internetAddr + "/"
	d.step("a file with a fault is refused whole", "sed s/80/0/ "+groupFile+" | "+mknetd+"policy apply -f -", expect{fails: true, has: []string{"spec.ingress[0].ports[0].port"}})
	d.step("a SecurityGroup for pods", "cat "+groupFile+"; "+mknetd+"policy apply -f "+groupFile, expect{has: []string{"created"}})
	d.step("a NetworkACL for children", "cat "+aclFile+"; "+mknetd+"policy apply -f "+aclFile, expect{has: []string{"created"}})

	d.step("what the model says: pod to pod by HTTP", mknetd+"policy explain --from "+a.addr+" --to "+b.addr+" --port 80", expect{has: []string{": allowed"}})
	d.step("and so it is", a.in()+"curl -s --max-time 10 http://"+b.addr+"/", expect{has: []string{b.name + " here"}})
	d.step("pod to pod by ICMP", mknetd+"policy explain --from "+a.addr+" --to "+b.addr+" --proto icmp", expect{has: []string{": denied", "no rule matches"}})
	d.step("and so it is", a.in()+"ping -c2 -i0.2 -W1 "+b.addr, expect{fails: true, has: []string{"100% packet loss"}})
	d.step("the node to a pod", mknetd+"policy explain --from "+hostAddr+" --to "+b.addr+" --port 80", expect{has: []string{": denied"}})
	d.step("and so it is", "curl -s --max-time 2 http://"+b.addr+"/", expect{fails: true, lacks: []string{"here"}})
	d.step("a child to the server", mknetd+"policy explain --from "+child.addr+" --to "+internetAddr+" --port 80", expect{has: []string{": denied", "spec.egress[0]"}})
	d.step("and so it is", internet, expect{fails: true, lacks: []string{"hello"}})
	d.step("all else of the child passes", child.in()+"ping -c2 -i0.2 -W5 "+internetAddr, expect{has: []string{" 0% packet loss"}})

	d.step("without the documents", mknetd+"policy delete attachment/web securitygroup/web attachment/children networkacl/children", expect{has: []string{"deleted"}})
	d.step("the child reaches the server", internet, expect{has: []string{"hello"}})
	d.step("and the node the pod", "curl -s --max-time 10 http://"+b.addr+"/", expect{has: []string{b.name + " here"}})
	return nil
}
