"""Parts of one's own, one file each, as a user would write them; `OWN` has some of each kind."""

from tests.own_parts import bare, gate, order, policy, reducer, signed_order

OWN = {
    "quota": [policy.one_at_a_time(least=2)],
    "ordering": [order.rotated(by=3), signed_order.harder_first()],
    "reducer": [reducer.rounded_sum(), bare.plain_sum()],
    "gate": [gate.after(3)],
}
