"""Two tables, ids of any size, training, rows read back. Run it with `python -m examples.quickstart`."""

import torch

import shoal

tables = [shoal.Table("item", dim=16, features=["item", "history"]), shoal.Table("user", dim=16)]
bags = shoal.EmbeddingBagCollection(tables, seed=0)
top = torch.nn.Linear(3 * 16, 1)
adam = torch.optim.Adam(top.parameters(), lr=0.01)
ids = shoal.KeyedJaggedTensor(  # two samples; the second has an empty history
    keys=["user", "item", "history"],
    values=torch.tensor([7, -8, 10**18, 42, 5, 42, 10**18]),
    lengths=torch.tensor([1, 1, 1, 1, 3, 0]),
)
clicks = torch.tensor([[1.0], [0.0]])
for _ in range(100):
    adam.zero_grad()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(top(bags(ids).values()), clicks)
    loss.backward()  # unseen ids got rows in the forward pass; all rows are updated here
    adam.step()

bags.eval()  # from here on nothing is inserted
print(f"loss {loss:.4f}; bags(ids)['user'] is {list(bags(ids)['user'].shape)}")
item = bags.table("item")
print(f"{len(item)} items; item 42 starts with {item.lookup([42])[0, :4].tolist()}")
